"""What became of each transfer, at each side, as its user saw it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError, DeviceError
from aiokv.proto.parts import State
from aiokv.testing.simulation.scenario import FetchPlan, OfferPlan, Request

if TYPE_CHECKING:
    from aiokv.testing.simulation.process import Process

__all__ = ["Record"]

#: On top of the bounds that the protocol gives, for turns of the loop and rounded timers (ns).
SLACK_NS = 100_000_000

#: Where nothing is wrong with the world, a transfer that is given up is quiet in this time (ns), which
#: includes what the devices still have to do, and is less than the time of a lease.
PROMPT_NS = 500_000_000


class Record:
    """One side of one transfer.

    Attributes:
        begun_at: When it began (ns); 0 if it never did.
        settled_at: When its user gave it up or heard that it failed (ns); 0 before.
        body_over_at: When the body of the ``async with`` was through (ns).
        over_at: When its user had the blocks back (ns); 0 before.
        error: What the ``async with`` was left by; None where it was left normally.
    """

    def __init__(
        self, process: Process, handle: Offer | Fetch, request: Request, plan: OfferPlan | FetchPlan
    ) -> None:
        self.process = process
        self.handle = handle
        self.request = request
        self.plan = plan
        self.task = asyncio.current_task()
        self.begun_at = self.settled_at = self.body_over_at = self.over_at = 0
        self.error: BaseException | None = None

    def __str__(self) -> str:
        verb = "offer" if isinstance(self.handle, Offer) else "fetch"
        attempt = f"#{self.request.attempt}" if self.request.attempt else ""
        return f"{self.process.name}: {verb} of {self.request.tid}{attempt}"

    @property
    def offers(self) -> bool:
        """Whether it is the producer's side."""
        return isinstance(self.handle, Offer)

    @property
    def landed(self) -> bool:
        """Whether it began and all parts ended well."""
        return bool(self.over_at and self.begun_at) and self.handle.error is None

    @property
    def quarantined(self) -> bool:
        """Whether its blocks never became quiet, so that they stay the engine's."""
        return isinstance(self.handle.error, DeviceError) and "stay leased" in str(self.handle.error)

    @property
    def lease_ran_out(self) -> bool:
        """Whether it ended because a reader's lease did, so that the reader may still be reading."""
        now = self.process.world.time.now
        return any(
            part.role == "producer" and 0 < part.quiet_at < now and part.state is not State.LANDED
            for part in self.handle._transfer.parts
        )

    # -- told by the user's task

    def begun(self) -> None:
        """The transfer runs."""
        self.begun_at = self.process.world.time.now
        self.process.world.note(self.process.name, f"{self} begins")

    def settled(self) -> None:
        """The user gives it up, or hears that it failed: from now on the drain bound counts."""
        if self.begun_at and not self.settled_at:
            self.settled_at = self.process.world.time.now

    def body_over(self) -> None:
        """The body of the ``async with`` has come to its end."""
        self.body_over_at = self.process.world.time.now

    def over(self, error: BaseException | None) -> None:
        """The ``async with`` was left."""
        world = self.process.world
        self.over_at, self.error = world.time.now, error
        how = f"{type(error).__name__}: {error}" if error is not None else "well"
        world.note(self.process.name, f"{self} ends: {how}")
        if not self.begun_at:
            if self.handle._begun:
                world.fail(f"{self} began, and raised {error!r}")
            return
        if not self.handle.done():
            world.fail(f"{self} was left before it was over: {self.handle!r}")
        core = self.process.engine._core
        if core is not None and self.handle._transfer in core._courses:
            world.fail(f"{self} was left while its blocks were still leased")
        if sending := self.process.sending.pending(self.handle._transfer.key) if self.offers else 0:
            world.fail(f"{self} was left while {sending} chunks of its blocks were still being sent")
        if error is None and self.handle.error is not None:
            world.fail(f"{self} failed with {self.handle.error!r}, and its user wasn't told")
        if isinstance(error, AiokvError) and self.handle.error is None:
            world.fail(f"{self} ended well, and raised {error!r}")
        self._check_time()

    def _check_time(self) -> None:
        world, process = self.process.world, self.process
        resolved = max(process.ended_at.get(part, 0) for part in self.handle._transfer.parts)
        drain = world.scenario.settings.drain_ns + SLACK_NS
        for what, since, lasts in (
            ("after its deadline and drain bound", self.begun_at, int(self.plan.deadline * 1e9) + drain),
            ("too late to be quiet", self.settled_at, PROMPT_NS if world.scenario.quiet else drain),
            ("after its user could go on", max(resolved, self.body_over_at), SLACK_NS),
        ):
            end = self.over_at if "user" in what else resolved
            late = end - since - lasts - world.time_suspended(process, since, end)
            if since and late > 0:
                world.fail(f"{self} ended {late / 1e9:.3f} s {what}")
