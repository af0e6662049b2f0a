"""Plays many seeds, or one again.

Usage: ``python -m aiokv.testing.simulation --seeds 2000``
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from aiokv.testing.simulation.batch import play_seeds
from aiokv.testing.simulation.drawing import draw
from aiokv.testing.simulation.run import Report, run_seed
from aiokv.testing.simulation.shrink import shrink

#: Seeds between two lines that tell how far it has got.
EVERY = 25


def main() -> int:
    """Parse the command line and play."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv.testing.simulation", description="Real engines in a simulated world."
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to play (200)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play at once (1)")
    parser.add_argument("--one", metavar="SEED", help="play this seed alone, and tell what is wrong")
    parser.add_argument(
        "--shrink", metavar="SEED", help="leave out of this seed what its failure doesn't need"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="tell all that happens, with messages")
    options = parser.parse_args()
    if options.shrink is not None:
        return _tell(shrink(draw(options.shrink), print), verbose=True)
    if options.one is not None:
        return _tell(run_seed(options.one, verbose=options.verbose), verbose=options.verbose)
    return _many(range(options.start, options.start + options.seeds), options.jobs)


def _tell(report: Report, *, verbose: bool) -> int:
    if verbose:
        _describe(report)
        print("\n".join(report.trace))
    for failure in report.failures:
        print(f"FAILED: {failure}")
    if report.error is not None:
        traceback.print_exception(report.error)
    print(f"{report.turns} turns; {_counted(Counter(report.counts))}")
    return 1 if report.failures else 0


def _describe(report: Report) -> None:
    scenario = report.scenario
    print(scenario.settings, scenario.channel, sep="\n")
    for each in (*scenario.ranks, *scenario.requests, *scenario.faults):
        print(each)


def _many(seeds: range, jobs: int) -> int:
    begun, played, failed = time.monotonic(), 0, []
    counts: Counter[str] = Counter()
    for seed, failures, found in play_seeds(seeds, jobs):
        played += 1
        counts += found
        if failures:
            failed.append(seed)
            print(f"\nseed {seed} failed: {failures[0]}")
            print(f"    python -m aiokv.testing.simulation --one {seed} -v", flush=True)
        if played % EVERY == 0 or played == len(seeds):
            each = (time.monotonic() - begun) / played * 1e3
            line = f"{played} of {len(seeds)} seeds, {len(failed)} failed, {each:.1f} ms a seed"
            print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    print(
        f"\n{len(failed)} of {played} seeds failed{': ' if failed else ''}{', '.join(map(str, failed[:50]))}"
    )
    print(_counted(counts))
    return 1 if failed else 0


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
