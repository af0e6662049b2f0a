"""What every test runs under: two event loops, one seed, a trap for blocking calls, a guard for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from blockbuster import BlockBuster, BlockBusterFunction
from hypothesis import settings

# No assertion on time, and a failure is repeatable from what it prints alone, with no stored examples.
settings.register_profile("aiokv", deadline=None, database=None, print_blob=True)
settings.load_profile("aiokv")

FAILED = pytest.StashKey[bool]()


# -- two event loops ------------------------------------------------------------------------------


def show_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Say where each task stands, for a test that hung: its own traceback ends in the selector."""
    for task in asyncio.all_tasks(loop):
        task.print_stack()


class DebugLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, always in debug mode: pytest-asyncio has one switch for all loops."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except pytest.fail.Exception:  # the test's time-out, raised in the selector
            show_tasks(self)
            raise


class UvLoop(uvloop.Loop):
    """uvloop, stopped by a test's time-out, which it would hand to the exception handler and wait on."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), pytest.fail.Exception):
            show_tasks(self)
            self.stop()
        super().call_exception_handler(context)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"debug": DebugLoop, "uvloop": UvLoop}


# -- one seed -------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="for the order of tests, for hypothesis and the seed fixture")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    UvLoop().close()  # the first one makes a pipe that the process keeps; it is no test's leak
    if config.option.seed is None:
        told: dict[str, int] = getattr(config, "workerinput", {})  # in one of several processes
        config.option.seed = told.get("seed", random.SystemRandom().getrandbits(32))
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = config.option.seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tests are divided among processes, which have to agree on their order."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(tryfirst=True)  # pytest then puts together what shares a fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in random order, and the tests in each: none may need what another left."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
        if item.get_closest_marker("one_loop") and "debug" in item.callspec.id.split("-"):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    order = random.Random(config.option.seed)
    files = list(by_file.values())
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    items[:] = [item for tests in files for item in tests]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat this run: --seed {config.option.seed}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own number, the same again with the same ``--seed``, whatever runs before it."""
    return zlib.crc32(request.node.nodeid.encode(), request.config.option.seed & 0xFFFFFFFF)


# -- nothing blocks the loop ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def blocking_calls() -> BlockBuster:
    """Makes sleep, locks, files, sockets and DNS raise, where aiokv calls them and a loop would wait."""
    trap = BlockBuster("aiokv")
    for name in ("os.fsync", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen.wait"):
        trap.functions[name] = BlockBusterFunction(None, name, scanned_modules="aiokv")
    return trap


@pytest.fixture(autouse=True)
def nothing_blocks(request: pytest.FixtureRequest, nothing_left: None) -> Iterator[None]:
    """The trap, for asyncio tests that aren't marked ``may_block``; synchronous tests may block."""
    if not request.node.get_closest_marker("asyncio") or request.node.get_closest_marker("may_block"):
        yield
        return
    trap: BlockBuster = request.getfixturevalue("blocking_calls")
    trap.activate()
    yield
    trap.deactivate()


# -- nothing is left behind -----------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    # A traceback keeps what the failed test's frames hold, so it is spared the checks below.
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def held() -> set[str]:
    """What this process holds and a test could leave behind, a line for each."""
    lines = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the others
            lines.add(f"descriptor {descriptor.name}: {descriptor.readlink()}")
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a native thread that just ended
            lines.update(f"process {pid}" for pid in children.read_text().split())
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in mapping or "/dev/shm/" in mapping:
            lines.add(f"shared memory {mapping}")
    return lines


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor, a process or mapped shared memory behind."""
    before = held()
    yield
    if held() <= before or request.node.stash.get(FAILED, False):
        return
    gc.collect()  # only now: it takes longer than most tests
    for thread in threading.enumerate():
        if f"thread {thread.name} ({thread.ident})" not in before:
            thread.join(timeout=2)  # it may be on its last line
    if left := sorted(held() - before):
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest_asyncio.fixture
async def quiet_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a test that leaves a task pending, or an error to the loop's own handler."""
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: errors.append(f"{context['message']}: {context.get('exception')!r}")
    )
    yield
    if request.node.stash.get(FAILED, False):
        return
    pending = [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if pending or errors:
        pytest.fail("\n".join(["pending tasks and unhandled errors:", *pending, *errors]), pytrace=False)


@pytest.fixture(autouse=True)
def quiet_loop_for_asyncio(request: pytest.FixtureRequest, nothing_left: None) -> None:
    """Asked for before the test's own fixtures, so checked after they ended and before the loop does."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("quiet_loop")


# -- what this machine can't run ------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            if os.environ.get("AIOKV_REQUIRE_GPU") == "1":
                pytest.fail("AIOKV_REQUIRE_GPU is set, and there is no CUDA device", pytrace=False)
            pytest.skip("needs a CUDA device")
