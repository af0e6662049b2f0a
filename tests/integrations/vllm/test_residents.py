from __future__ import annotations

from aiokv.integrations.vllm.residents import Residents

A, B, C = b"a", b"b", b"c"


def test_a_block_is_there_if_all_ranks_have_it() -> None:
    known = Residents(2)
    assert known.add([A, B], 0) == []
    assert A not in known
    assert known.add([A], 1) == [A]
    assert known.add([A], 1) == []  # told before
    assert A in known
    assert B not in known
    assert known.prefix([A, B, C], 0) == 1
    assert known.discard([A, B, C], 0) == [A]
    assert known.discard([A], 1) == []
    assert not known._ranks


def test_a_prefix_ends_at_the_first_gap() -> None:
    known = Residents(1)
    known.add([A, C], 0)
    assert known.prefix([A, B, C], 0) == 1
    assert known.prefix([A, B, C], 1) == 1
    assert known.prefix([A, B, C], 2) == 3


def test_a_rank_that_lost_count_has_nothing() -> None:
    known = Residents(2)
    for rank in range(2):
        known.add([A, B], rank)
    assert sorted(known.lose(0)) == [A, B]
    assert known.add([A], 0) == [A]
    assert known.clear() == [A]
    assert known.clear() == []
