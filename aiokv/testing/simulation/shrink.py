"""What a failure needs: the smallest part of a scenario that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from aiokv.testing.faultynetwork import Faults
from aiokv.testing.simulation.run import Report, play
from aiokv.testing.simulation.scenario import Request, Scenario

__all__ = ["shrink"]


def shrink(scenario: Scenario, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Leave out of a failing scenario what it fails without.

    Args:
        scenario: One that fails.
        tell: Told of each step.

    Returns:
        The report of the smallest scenario that was found.

    Raises:
        ValueError: It doesn't fail.
    """
    report = play(scenario)
    if not report.failures:
        raise ValueError("a scenario that passes can't be made smaller")
    wanted = _kind(report)
    found = True
    while found:
        found = False
        for what, smaller in _smaller(report.scenario):
            attempt = play(smaller)
            if attempt.failures and _kind(attempt) == wanted:
                tell(f"without {what}")
                report, found = attempt, True
                break
    return play(report.scenario, verbose=True)


def _kind(report: Report) -> str:
    """What went wrong, without the names and figures."""
    words = report.failures[0].split("\n", 1)[0].split()
    return " ".join(word for word in words if word.isalpha())


def _smaller(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    for request in scenario.requests:
        kept = tuple(each for each in scenario.requests if each is not request)
        yield f"request {request.tid}", replace(scenario, requests=kept)
    for fault in scenario.faults:
        kept_faults = tuple(each for each in scenario.faults if each is not fault)
        yield f"fault {fault.kind}", replace(scenario, faults=kept_faults)
    if scenario.channel != Faults():
        yield "faults of the channel", replace(scenario, channel=Faults())
    for request in scenario.requests:
        for what, changed in _smaller_requests(request):
            swapped = tuple(changed if each is request else each for each in scenario.requests)
            yield f"{what} of {request.tid}", replace(scenario, requests=swapped)


def _smaller_requests(request: Request) -> Iterator[tuple[str, Request]]:
    if request.retry:
        yield "attempts", replace(request, retry=False)
    for offer in request.offers:
        kept = tuple(each for each in request.offers if each is not offer)
        yield f"offer at {offer.rank}", replace(request, offers=kept, odd=True)
    for fetch in request.fetches:
        kept_fetches = tuple(each for each in request.fetches if each is not fetch)
        yield f"fetch at {fetch.rank}", replace(request, fetches=kept_fetches, odd=True)
