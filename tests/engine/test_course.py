"""What the engine notes of a transfer, and what it tells nobody but the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiokv
from aiokv.device.mocked import MockedDevice
from aiokv.engine.course import Course, FetchCourse
from aiokv.errors import DeviceError
from aiokv.proto.transfers import Fetching, Offering, Part

OFFERED = {"tid": "t", "attempt": 0, "deadline": 0, "blocks": (), "tokens": 1}
FETCHED = {"tid": "t", "attempt": 2, "deadline": 0, "blocks": ()}


@pytest.mark.parametrize("kind", [aiokv.Offer, aiokv.Fetch])
def test_callers_see_only_what_they_may_call(kind: type) -> None:
    """What the engine calls is not theirs: adding a name here is a decision."""
    both = {
        "attempt",
        "cancel",
        "done",
        "error",
        "explain",
        "progress",
        "start",
        "tokens",
        "transfer_id",
        "wait",
    }
    own = {aiokv.Offer: {"layer_ready"}, aiokv.Fetch: {"layer", "layer_ordered", "layers", "more"}}[kind]
    assert {name for name in dir(kind) if not name.startswith("_")} == both | own


@pytest.mark.asyncio
async def test_who_waits_for_quiet_hears_of_the_end_and_of_nothing_else() -> None:
    course = Course(Offering(**OFFERED))
    waiting = asyncio.ensure_future(course.quiet())
    await asyncio.sleep(0)
    course.changed()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    course.end()
    await waiting
    await course.quiet()


@pytest.mark.parametrize(
    ("course", "text"),
    [
        (lambda: Course(Offering(**OFFERED)), "Offer of 't' failed and nobody saw: broken"),
        (
            lambda: FetchCourse(Fetching(**FETCHED), MockedDevice().stream()),
            "Fetch of 't' attempt 2 failed and nobody saw: broken",
        ),
    ],
)
def test_what_nobody_saw_is_logged(course, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "aiokv"):
        for observed, error in ((True, DeviceError("broken")), (False, None), (False, DeviceError("broken"))):
            each = course()
            each.observed, each.transfer.error = observed, error
            del each
    assert caplog.messages == [text]


def test_layers_are_ordered_once_all_parts_are_and_only_for_who_asks() -> None:
    device = MockedDevice()
    stream, side = device.stream(), device.stream()
    fetching = Fetching(**FETCHED)
    fetching.parts = [Part(transfer=fetching, role="consumer") for _ in range(2)]
    course = FetchCourse(fetching, stream)
    course.submitted(fetching.parts[0], [1], side.record())
    assert not course.ordered(1)
    fetching.parts[1].landed = 0b10
    assert course.ordered(1)
    assert not course.ordered(0)
    assert not stream.queued
    course.order(1)
    assert stream.queued == 1  # what has landed needs no waiting
    fetching.parts[0].landed = 0b10
    course.order(1)
    assert stream.queued == 1
