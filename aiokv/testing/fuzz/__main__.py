"""Runs one kind of fuzzing, or all.

Usage: ``python -m aiokv.testing.fuzz --cases 1000000``
"""

from __future__ import annotations

import argparse
import importlib
import secrets
import sys
import time
from collections import Counter

#: Of a thousand cases, how many each kind gets when all are asked for: by what a case of it costs.
SHARES = {"decoder": 900, "control": 80, "data": 20}


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv.testing.fuzz", description="Nonsense for all that takes bytes from elsewhere."
    )
    parser.add_argument("--cases", type=int, default=20_000, help="how many in all (20000)")
    parser.add_argument("--seed", type=int, help="draws the cases; by default a new one, which is printed")
    parser.add_argument(
        "--what", choices=[*SHARES, "all"], default="all", help="a kind alone; all share the cases (all)"
    )
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    kinds = list(SHARES) if options.what == "all" else [options.what]
    failed = 0
    for kind in kinds:
        cases = options.cases if len(kinds) == 1 else max(1, options.cases * SHARES[kind] // 1000)
        print(f"{kind}: {cases} cases by seed {seed}", flush=True)
        failed += not _run(kind, cases, seed)
    return 1 if failed else 0


def _run(kind: str, cases: int, seed: int) -> bool:
    fuzz = importlib.import_module(f"aiokv.testing.fuzz.{kind}").fuzz
    begun = time.monotonic()
    try:
        counts: Counter[str] = fuzz(cases, seed)
    except AssertionError as wrong:
        print(f"{kind}: FAILED: {wrong}")
        return False
    took = time.monotonic() - begun
    print(f"{kind}: {took:.1f} s, {took / cases * 1e6:.0f} us a case; {_counted(counts)}", flush=True)
    return True


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
