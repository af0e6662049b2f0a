"""Time to first token of a prefill and a decode vLLM on this host's CPU, over one vLLM alone.

Where NIXL is installed a pair joined by vLLM's own NixlConnector is measured beside it. Each instance has one
core; what is asked is new each time, one request after another, so that nothing is cached and nothing waits.
Those that aren't asked are stopped meanwhile, as NIXL's threads look for work all the time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from aiokv.bench.child import Child, ChildFailed, child
from aiokv.bench.figures import Spread, over
from aiokv.bench.inference import ENVIRONMENT, FUNCTION, make_model
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

__all__ = ["GOALS", "Asking", "missing", "run"]

GOALS = {
    "vllm.ttft_over_alone": Goal(None, "lower"),
    "vllm.ttft_over_nixl": Goal(None, "lower"),
}

#: Tokens of a prompt, and of an answer.
_PROMPT, _ANSWER = 1024, 16
#: Seconds that a vLLM may take to start, and to answer.
_START, _WAIT = 300, 60
#: What a router says to the prefill side, in the words that both connectors know.
_LEAVE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_OURS = {
    "kv_connector": "AioKVConnector",
    "kv_connector_module_path": "aiokv.integrations.vllm",
    "kv_role": "kv_both",
}
#: What an instance's ``--kv-transfer-config`` is, and its environment besides that of all.
_Instance = tuple[dict[str, str] | None, dict[str, str]]


class _Figures(NamedTuple):
    """Of one round, in the middle."""

    ttft_ms: float
    token_ms: float
    #: CPU of all threads of all its processes for an answer.
    cpu_ms: float
    #: CPU of each of the connector's hooks in a step that computes something, at the side that answers.
    hooks_us: dict[str, float]
    #: Of all together in a step that only waits for KV; 0 where there was none.
    waiting_us: float


def missing() -> str:
    """What this machine lacks for it."""
    lacking = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)}: the environment vllm of tox has it" if lacking else ""


class Asking:
    """Asks an instance, or a prefill side and then a decode side.

    Args:
        instances: One, which answers, or a prefill side and one that answers; they are stopped but in rounds.

    Attributes:
        answers: What was answered so far; all sides are asked the same.
    """

    def __init__(self, *instances: Child) -> None:
        *self._prefill, self._decode = instances
        self.answers: list[list[int]] = []
        self._signal(signal.SIGSTOP)

    async def round(self, count: int) -> _Figures:
        """Ask for so many answers, one by one.

        Raises:
            ChildFailed: An instance ended, or gave no answer, or only a part of it.
        """
        self._signal(signal.SIGCONT)
        figures = [await self._one() for _ in range(count)]
        self._signal(signal.SIGSTOP)
        names = figures[0].hooks_us
        return _Figures(
            median(each.ttft_ms for each in figures),
            median(each.token_ms for each in figures),
            median(each.cpu_ms for each in figures),
            {name: median(each.hooks_us[name] for each in figures) for name in names},
            median(each.waiting_us for each in figures),
        )

    async def _one(self) -> _Figures:
        drawn = random.Random(len(self.answers))  # noqa: S311 (no secret)
        prompt = [drawn.randrange(3, 512) for _ in range(_PROMPT)]
        began, params, cpu_ns = time.monotonic_ns(), None, 0
        for prefill in self._prefill:
            said = await self._answer(prefill, prompt, 1, _LEAVE)
            params, cpu_ns = said["params"], said["cpu_ns"]
        said = await self._answer(self._decode, prompt, _ANSWER, params)
        self.answers.append(said["tokens"])
        (_, hooks_us), (_, waiting_us) = said["computing"], said["waiting"]
        return _Figures(
            (said["first"] - began) / 1e6,
            (said["last"] - said["first"]) / (_ANSWER - 1) / 1e6,
            (cpu_ns + said["cpu_ns"]) / 1e6,
            hooks_us,
            sum(waiting_us.values()),
        )

    async def _answer(
        self, instance: Child, prompt: list[int], tokens: int, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        name = str(len(self.answers))
        said = await _soon(instance.ask("", name=name, prompt=prompt, tokens=tokens, params=params), _WAIT)
        if said["reason"] != "length":
            raise ChildFailed(f"a vLLM did not answer: {said['reason']}")
        return said

    def _signal(self, number: int) -> None:
        for each in (*self._prefill, self._decode):
            each.signal(number)


async def _soon(heard: Awaitable[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a child says, which may have died of something that keeps its process."""
    try:
        async with asyncio.timeout(seconds):
            return await heard
    except TimeoutError as error:
        raise ChildFailed(f"a vLLM said nothing for {seconds} s") from error


async def _asking(stack: AsyncExitStack, model: str, *instances: _Instance) -> Asking:
    """Instances that have started, one after the other: all need the same cores."""
    found = []
    for transfer, variables in instances:
        started = await stack.enter_async_context(
            child(FUNCTION, environment={**ENVIRONMENT, **variables}, model=model, transfer=transfer)
        )
        await _soon(started.heard(), _START)
        found.append(started)
    return Asking(*found)


def _nixl() -> list[_Instance]:
    """A pair, each with a port of its own, on which the other asks for what it needs to know."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    return [(transfer, {"VLLM_NIXL_SIDE_CHANNEL_PORT": port}) for port in ports]


async def _run(report: Report, options: Options) -> None:
    rounds, count = (3, 3) if options.quick else (15, 6)
    async with AsyncExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiokv-vllm-"))))
        sides = {
            "one alone": await _asking(stack, model, (None, {})),
            "a pair by aiokv": await _asking(stack, model, (_OURS, {}), (_OURS, {})),
        }
        if importlib.util.find_spec("nixl") is None:
            report.absent["vllm.ttft_over_nixl"] = "nixl isn't installed"
        else:
            try:
                sides["a pair by NIXL"] = await _asking(stack, model, *_nixl())
            except ChildFailed as error:
                report.absent["vllm.ttft_over_nixl"] = f"the pair by NIXL did not start: {error}"
        found = await alternate(rounds, {name: partial(side.round, count) for name, side in sides.items()})
    wanted = sides["one alone"].answers
    if any(side.answers != wanted for side in sides.values()):
        raise ChildFailed("a pair answered otherwise than one alone")
    for name, figures in found.items():
        report.row(
            f"a prompt of {_PROMPT} tokens, an answer of {_ANSWER}",
            {
                "who": name,
                "first token, ms": Spread.of(each.ttft_ms for each in figures),
                "each token behind it, ms": Spread.of(each.token_ms for each in figures),
                "CPU of all threads, ms an answer": Spread.of(each.cpu_ms for each in figures),
                "hooks, us of CPU a step": Spread.of(sum(each.hooks_us.values()) for each in figures),
                "and one that waits": Spread.of(each.waiting_us for each in figures),
            },
        )
    pairs = {name: figures for name, figures in found.items() if name != "one alone"}
    for hook in next(iter(pairs.values()))[0].hooks_us:
        cells = {name: Spread.of(each.hooks_us[hook] for each in figures) for name, figures in pairs.items()}
        report.row("hooks in a step that computes, us of CPU", {"hook": hook, **cells})
    ttft = {name: [each.ttft_ms for each in figures] for name, figures in found.items()}
    report.ratio("vllm.ttft_over_alone", over(ttft["a pair by aiokv"], ttft["one alone"]))
    if "a pair by NIXL" in ttft:
        report.ratio("vllm.ttft_over_nixl", over(ttft["a pair by aiokv"], ttft["a pair by NIXL"]))


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
