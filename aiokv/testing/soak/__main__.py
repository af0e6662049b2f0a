"""Runs a soak.

Usage: ``python -m aiokv.testing.soak --minutes 30``
"""

from __future__ import annotations

import argparse
import secrets
import sys

from aiokv.testing.soak.run import run

#: What is told of what is wrong, at most.
_MOST = 20


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv.testing.soak",
        description="Real processes that transfer while they are killed, stopped and cut off.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long (5)")
    parser.add_argument("--workers", type=int, default=4, help="how many processes (4)")
    parser.add_argument("--seed", type=int, help="draws what happens; by default a new one, which is printed")
    options = parser.parse_args()
    if options.workers < 2:
        parser.error("--workers: it takes two for a transfer")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"{options.workers} workers for {options.minutes:g} minutes by seed {seed}", flush=True)
    try:
        wrong = run(options.minutes * 60, seed, options.workers, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print("interrupted; all workers were ended")
        return 130
    for text in wrong[:_MOST]:
        print(f"WRONG: {text}")
    print(f"{len(wrong)} wrong" if wrong else "no wrong byte, no hang, no leak, no process left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
