"""``python -m aiokv.bench NAME``: measure, show tables, and write JSON or a plot."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from aiokv.bench.machine import describe
from aiokv.bench.registry import DEVICES, Benchmark, Options, load, names
from aiokv.bench.report import Report

__all__ = ["main"]

_WIDE = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 if a benchmark failed."""
    parser = _parser()
    given = parser.parse_args(arguments)
    known = names(given.device)
    if given.name not in (*known, "all"):
        parser.error(f"{given.name} has no --device {given.device}; {', '.join(known)} have")
    for option, path in (("--json", given.json), ("--plot", given.plot)):
        if path is not None and not _writable(Path(path)):
            parser.error(f"{option} {path} can't be written")
    wanted = known if given.name == "all" else [given.name]
    try:
        from rich.console import Console

        from aiokv.bench.show import show_ratios, show_rows

        plot = import_module("aiokv.bench.plot") if given.plot else None
    except ModuleNotFoundError as error:
        print(f"{error}; pip install 'aiokv[bench]'", file=sys.stderr)
        return 2
    chosen = [load(name, given.device) for name in wanted]
    # A file or a pipe has no width; there the tables take what they need.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    options = Options(
        quick=given.quick, peers=given.peers, profiles=given.profile or "", trace=given.trace or ""
    )
    try:
        report = _read(given.read) if given.read else Report(describe())
    except (OSError, ValueError) as error:
        parser.error(f"--from {given.read}: {error}")
    failed = []
    for benchmark in chosen:
        name = benchmark.name
        console.print(f"{name}: {benchmark.about}", markup=False, highlight=False, soft_wrap=True)
        if not given.read and not _measured(benchmark, report, options):
            failed.append(name)
        show_rows(console, report, name)
        if given.json:  # after each, so that an hour's work isn't lost with the last one
            Path(given.json).write_text(report.to_json(), encoding="utf-8")
    show_ratios(console, report)
    if plot is not None:
        draws = {each.name: each.draw for each in chosen if each.draw is not None}
        plot.write(report, given.plot, draws)
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _read(file: str) -> Report:
    """What an earlier run wrote."""
    return Report.of_json(Path(file).read_text(encoding="utf-8"))


def _writable(file: Path) -> bool:
    """Whether the file can be written, as far as can be seen beforehand; measuring takes minutes."""
    if file.exists():
        return not file.is_dir() and os.access(file, os.W_OK)
    return file.parent.is_dir() and os.access(file.parent, os.W_OK)


def _measured(benchmark: Benchmark, report: Report, options: Options) -> bool:
    """Run one benchmark; False if it failed."""
    report.begin(benchmark.name, benchmark.goals)
    lacking = benchmark.missing()
    if lacking:
        report.end(lacking)
        return True
    began = time.monotonic()
    try:
        benchmark.run(report, options)
    except Exception as error:  # noqa: BLE001 - what the others give is worth having all the same
        traceback.print_exc()
        report.end(f"the benchmark failed: {error!r}")
        return False
    report.end()
    print(f"{benchmark.name}: took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return True


def _parser() -> argparse.ArgumentParser:
    known = names()
    parser = argparse.ArgumentParser(
        prog="python -m aiokv bench",
        description="Measures aiokv beside what it is compared with; shows tables, writes JSON or a plot.",
    )
    parser.add_argument("name", choices=[*known, "all"], help="what to measure; all: what this machine can")
    parser.add_argument("--device", choices=DEVICES, default="host", help="completion, transfer: of a GPU")
    parser.add_argument("--quick", action="store_true", help="within a minute each, less exact")
    parser.add_argument("--json", metavar="FILE", help="write machine, rows and ratios")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw what was measured")
    parser.add_argument(
        "--from", dest="read", metavar="FILE", help="measure nothing; show and draw what --json wrote there"
    )
    parser.add_argument("--peers", action="store_true", help="transfer: NIXL, UCXX and Mooncake, too")
    parser.add_argument(
        "--trace", metavar="FILE", help="offload: replay these requests (JSON lines with hash_ids)"
    )
    parser.add_argument(
        "--profile", metavar="FOLDER", help="scale, gil, transfer --device cuda: write profiles there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
