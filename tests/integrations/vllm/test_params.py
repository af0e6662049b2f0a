from __future__ import annotations

import pytest

from aiokv.integrations.vllm.orders import Ticket
from aiokv.integrations.vllm.params import Pull, answer, minted, pull_of, readers


def test_what_is_answered_is_understood() -> None:
    said = answer(Ticket("abc", 1), ["tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001"], 300, "engine", 20.0)
    sources = ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001")
    assert pull_of(said) == Pull(Ticket("abc", 1), sources, 300, hold=20.0)


@pytest.mark.parametrize(
    ("where", "sources"),
    [
        ({"remote_bootstrap_addr": "http://10.0.0.1:7000"}, ("tcp://10.0.0.1:7000",)),
        ({"remote_bootstrap_addr": "10.0.0.1:7000"}, ("tcp://10.0.0.1:7000",)),
        (
            {"remote_host": "prefill", "remote_port": 7000, "tp_size": 2},
            ("tcp://prefill:7000", "tcp://prefill:7001"),
        ),
    ],
)
def test_a_router_names_the_prefill_side(where: dict[str, object], sources: tuple[str, ...]) -> None:
    said = {"do_remote_prefill": True, "transfer_id": "abc", **where}
    assert pull_of(said) == Pull(Ticket("abc"), sources, None)


def test_the_prefill_side_names_the_decode_side() -> None:
    said = {"transfer_id": "abc", "push": True}
    assert pull_of({**said, "do_remote_prefill": True, "tp_size": 2}) == Pull(Ticket("abc"), (), None, 2)
    here = {**said, "do_remote_decode": True, "remote_addresses": ["tcp://10.0.0.2:7000"]}
    assert readers(here) == ("tcp://10.0.0.2:7000",)
    assert readers({"do_remote_decode": True}) == ()
    for wrong in (None, [], "tcp://10.0.0.2:7000"):
        with pytest.raises((TypeError, ValueError), match="remote_addresses"):
            readers({**here, "remote_addresses": wrong})


@pytest.mark.parametrize(
    "said", [{}, {"do_remote_prefill": False}, {"do_remote_decode": True, "transfer_id": "abc"}]
)
def test_nothing_to_fetch(said: dict[str, object]) -> None:
    assert pull_of(said) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"transfer_id": None}, "transfer_id"),
        ({"transfer_id": 7}, "id"),
        ({"transfer_id": ""}, "id"),
        ({"remote_addresses": []}, "remote_addresses"),
        ({"remote_addresses": "tcp://10.0.0.1:7000"}, "remote_addresses"),
        ({"remote_addresses": None}, "remote_host"),
        ({"attempt": -1}, "attempt"),
        ({"deadline": 0}, "deadline"),
        ({"remote_tokens": -1}, "remote_tokens"),
        ({"remote_hold": 0}, "remote_hold"),
        ({"remote_hold": "long"}, "remote_hold"),
        ({"remote_addresses": None, "remote_host": "a", "remote_port": 1, "tp_size": 0}, "tp_size"),
    ],
)
def test_what_cant_be_meant_is_named(wrong: dict[str, object], named: str) -> None:
    good = {"do_remote_prefill": True, "transfer_id": "abc", "remote_addresses": ["tcp://10.0.0.1:7000"]}
    with pytest.raises((TypeError, ValueError), match=named):
        pull_of({**good, **wrong})


def test_a_minted_id() -> None:
    assert minted({}) is None
    assert minted({"transfer_id": "abc"}) == Ticket("abc")
    assert minted({"transfer_id": "abc", "attempt": 1, "deadline": 2.5}) == Ticket("abc", 1, 2.5)
