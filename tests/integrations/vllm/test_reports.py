from __future__ import annotations

from aiokv.integrations.vllm.orders import Blocks, Load, Orders, Recall, Send, Ticket
from aiokv.integrations.vllm.reports import Ended, Outcome, Reports

RECALL = Recall("r", (b"a",), 0, (Blocks(0, (4,)),))
LOAD = Load("r", Ticket("t"), ("there",), (Blocks(32, (5, 6)),), 32, 96)


def test_a_request_is_told_once_all_of_it_is_over() -> None:
    """What failed first is told when its siblings write nothing any more (vllm#56104)."""
    reports = Reports()
    reports.expect(Orders(loads=[LOAD], recalls=[RECALL]))
    reports.add(Ended(RECALL, (RECALL.blocks,)))
    outcome = reports.take()
    assert (outcome.loaded, outcome.failed, outcome.missed) == (set(), {}, 1)
    reports.add(Ended(LOAD, LOAD.blocks))
    outcome = reports.take()
    assert outcome.loaded == {"r"}
    assert outcome.failed == {"r": (RECALL.blocks, *LOAD.blocks)}
    assert (outcome.unloaded, outcome.missed) == (1, 0)
    assert reports.take() is None


def test_an_early_send_is_told_once_its_request_is_over() -> None:
    reports = Reports()
    sends = [Send(name, Ticket("t"), (Blocks(0, (7,)),), 32, early=True) for name in "abc"]
    reports.add(Ended(sends[0], ()))
    reports.expect(Orders(sends=sends))
    assert reports.take() == Outcome()
    assert reports.take() is None
    reports.expect(Orders(held=["a", "b"], lost=["c"]))
    assert reports.take().sent == {"a"}
    for send in sends[1:]:
        reports.add(Ended(send, send.blocks))
    outcome = reports.take()
    assert (outcome.sent, outcome.unsent) == ({"b"}, 1)
    assert reports.take() is None


def test_chunks_are_told_together_once_their_request_is_over() -> None:
    reports = Reports()
    first, second, last = (
        Send("a", Ticket("t").chunk(number), (Blocks(32 * number, (7 + number,)),), 32, last=number == 2)
        for number in range(3)
    )
    reports.expect(Orders(sends=[first]))
    reports.add(Ended(first, ()))
    reports.expect(Orders(sends=[second]))
    assert reports.take() == Outcome()
    reports.expect(Orders(sends=[last]))
    reports.add(Ended(last, ()))
    assert reports.take() == Outcome()
    reports.add(Ended(second, second.blocks))
    outcome = reports.take()
    assert (outcome.sent, outcome.unsent) == ({"a"}, 1)
    # Given up between two, when nothing is under way.
    reports.expect(Orders(sends=[first]))
    reports.add(Ended(first, ()))
    reports.take()
    reports.expect(Orders(held=["a"]))
    assert reports.take().sent == {"a"}
    # Blocks that were taken away.
    reports.expect(Orders(sends=[first]))
    reports.add(Ended(first, first.blocks))
    reports.expect(Orders(lost=["a"]))
    assert reports.take() == Outcome()
    assert not any(getattr(reports, name) for name in ("_sends", "_held", "_lost", "_unread", "_changed"))


def test_what_was_moved_is_counted() -> None:
    reports = Reports()
    reports.expect(Orders(loads=[LOAD], recalls=[RECALL]))
    reports.add(Ended(LOAD, (), 1.0, 10))
    reports.add(Ended(RECALL, (), 0.5, 20))
    send = Send("s", Ticket("t"), (Blocks(0, (7,)),), 32)
    other = Send("u", Ticket("t"), send.blocks, 32)
    reports.expect(Orders(sends=[send, other]))
    reports.add(Ended(send, ()))
    reports.add(Ended(other, send.blocks))
    outcome = reports.take()
    assert (outcome.loads, outcome.recalls) == ([(1.0, 10)], [(0.5, 20)])
    assert (outcome.sent, outcome.unsent, outcome.failed) == ({"s", "u"}, 1, {})
