"""Time to first token of a prefill and a decode vLLM on this host's CPU, over one vLLM alone.

Where NIXL is installed a pair joined by vLLM's own NixlConnector is measured beside it. Each instance has one
core; what is asked is new each time, one request after another, so that nothing is cached and nothing waits.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from aiokv.bench.child import Child, child
from aiokv.bench.figures import Spread, over
from aiokv.bench.inference import ENVIRONMENT, FUNCTION, make_model
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "vllm.ttft_over_alone": Goal(None, "lower"),
    "vllm.ttft_over_nixl": Goal(None, "lower"),
}

#: Tokens of a prompt, and of an answer.
_PROMPT, _ANSWER = 1024, 16
#: What a router says to the prefill side, in the words that both connectors know.
_LEAVE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Figures(NamedTuple):
    """Of one round, in the middle."""

    ttft_ms: float
    token_ms: float
    #: CPU of the connector's hooks for each step, at the side that answers.
    hooks_us: float


def missing() -> str:
    """What this machine lacks for it."""
    lacking = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)}: the environment vllm of tox has it" if lacking else ""


class _Asking:
    """Asks an instance, or a prefill side and then a decode side; answers must be alike.

    Args:
        prefill: None: there is one instance.
        decode: Answers.
    """

    def __init__(self, prefill: Child | None, decode: Child) -> None:
        self._prefill = prefill
        self._decode = decode
        self._asked = 0

    async def round(self, count: int) -> _Figures:
        """Ask for so many answers, one by one."""
        figures = [await self._one() for _ in range(count)]
        return _Figures(*(median(each) for each in zip(*figures, strict=True)))

    async def _one(self) -> _Figures:
        self._asked += 1
        drawn = random.Random(self._asked)  # noqa: S311 (no secret)
        prompt = [drawn.randrange(3, 512) for _ in range(_PROMPT)]
        name, began = str(self._asked), time.monotonic_ns()
        params = None
        if self._prefill is not None:
            said = await self._prefill.ask("", name=name, prompt=prompt, tokens=1, params=_LEAVE)
            params = said["params"]
        said = await self._decode.ask("", name=name, prompt=prompt, tokens=_ANSWER, params=params)
        return _Figures(
            (said["first"] - began) / 1e6,
            (said["last"] - said["first"]) / (_ANSWER - 1) / 1e6,
            said["hooks_ns"] / said["steps"] / 1e3,
        )


async def _instance(stack: AsyncExitStack, model: str, transfer: dict[str, Any] | None, **more: str) -> Child:
    environment = {**ENVIRONMENT, **more}
    started = await stack.enter_async_context(
        child(FUNCTION, environment=environment, model=model, transfer=transfer)
    )
    await started.heard()  # one after the other: all need the same cores
    return started


async def _run(report: Report, options: Options) -> None:
    rounds, count = (3, 3) if options.quick else (15, 8)
    async with AsyncExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiokv-vllm-"))))
        ours = {
            "kv_connector": "AioKVConnector",
            "kv_connector_module_path": "aiokv.integrations.vllm",
            "kv_role": "kv_both",
        }
        sides = {
            "one alone": _Asking(None, await _instance(stack, model, None)),
            "a pair by aiokv": _Asking(
                await _instance(stack, model, ours), await _instance(stack, model, ours)
            ),
        }
        if importlib.util.find_spec("nixl") is None:
            report.absent["vllm.ttft_over_nixl"] = "nixl isn't installed"
        else:
            nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in (5600, 5700)]
            pair = [await _instance(stack, model, nixl, **port) for port in ports]
            sides["a pair by NIXL"] = _Asking(*pair)
        found = await alternate(rounds, {name: partial(side.round, count) for name, side in sides.items()})
    for name, figures in found.items():
        report.row(
            f"a prompt of {_PROMPT} tokens, an answer of {_ANSWER}",
            {
                "who": name,
                "first token, ms": Spread.of(each.ttft_ms for each in figures),
                "each token behind it, ms": Spread.of(each.token_ms for each in figures),
                "hooks, us of CPU a step": Spread.of(each.hooks_us for each in figures),
            },
        )
    ttft = {name: [each.ttft_ms for each in figures] for name, figures in found.items()}
    report.ratio("vllm.ttft_over_alone", over(ttft["a pair by aiokv"], ttft["one alone"]))
    if "a pair by NIXL" in ttft:
        report.ratio("vllm.ttft_over_nixl", over(ttft["a pair by aiokv"], ttft["a pair by NIXL"]))


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
