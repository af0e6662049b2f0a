"""A vLLM in a process of its own, with a small model: told requests, it says when their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiokv.bench.child import Line

__all__ = ["ENVIRONMENT", "FUNCTION", "make_model", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.inference:serve"

#: One core for each instance, and no process beside it.
ENVIRONMENT = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

#: What vLLM calls of a connector in each step, beside its scheduler and in its worker.
_HOOKS = (
    ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    ("update_connector_output", "request_finished_all_groups", "take_events", "has_pending_push_work"),
    ("handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"),
    ("get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
    ("build_connector_worker_meta",),
)


#: Does nothing: its time is that of looking at the clock, in the midst of a model's step.
_NOTHING = "wait_for_layer_load"


def make_model(folder: Path) -> str:
    """Write a Llama of 20 million random weights there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # else all tokens are about as likely, and answers hang on rounding
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return str(folder)


async def serve(line: Line, *, model: str, transfer: dict[str, Any] | None) -> None:
    """Answer requests; between steps it listens."""
    instance = _Instance(line, model, transfer)
    line.say(up=True)
    listening = asyncio.ensure_future(instance.listen())
    listening.add_done_callback(lambda _: instance.wake())
    while not listening.done():
        if instance.busy:
            instance.step()
            await asyncio.sleep(0)  # between two steps what was asked meanwhile is heard
        else:
            await instance.woken()
    await listening  # what it failed of


class _Instance:
    """One vLLM."""

    def __init__(self, line: Line, model: str, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = (
            {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        )
        llm = LLM(
            model,
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=2048,
            **options,
        )
        self._sampling = SamplingParams
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._line = line
        self._wake = asyncio.Event()
        #: When the first and the last token of each request came (ns).
        self._times: dict[str, list[int]] = {}
        #: Of steps that computed something, and of those that only waited for KV.
        self._computing, self._waiting = _Steps(), _Steps()
        #: CPU of the process when it was told last (ns).
        self._cpu_ns = time.process_time_ns()
        #: Whether the last step computed something.
        self._computed = False
        self._scheduler.schedule = self._noted(self._scheduler.schedule)
        self._hooks = _Hooks()
        if transfer is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self._hooks.time(self._scheduler.connector, get_kv_transfer_group())

    def _noted(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(schedule)
        def noted(*args: object, **named: object) -> object:
            output = schedule(*args, **named)
            self._computed = output.total_num_scheduled_tokens > 0
            return output

        return noted

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._scheduler.has_requests() or self._engine.has_unfinished_requests())

    def wake(self) -> None:
        """Something has come."""
        self._wake.set()

    async def woken(self) -> None:
        """Wait for a request, or for the end."""
        await self._wake.wait()
        self._wake.clear()

    async def listen(self) -> None:
        """Take requests."""
        async for told in self._line:
            params = told["params"]
            sampling = self._sampling(
                temperature=0,
                max_tokens=told["tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            self._times[told["name"]] = []
            self._engine.add_request(told["name"], {"prompt_token_ids": told["prompt"]}, sampling)
            self.wake()

    def step(self) -> None:
        """One step of vLLM; says what is over."""
        outputs = self._engine.step()
        (self._computing if self._computed else self._waiting).add(self._hooks.taken())
        for output in outputs:
            times = self._times[output.request_id]
            times[1 if times else 0 :] = [time.monotonic_ns()]
            if output.finished:
                del self._times[output.request_id]
                before, self._cpu_ns = self._cpu_ns, time.process_time_ns()
                self._line.say(
                    first=times[0],
                    last=times[-1],
                    params=output.kv_transfer_params,
                    tokens=list(output.outputs[0].token_ids),
                    reason=output.outputs[0].finish_reason,
                    computing=self._computing.told(),
                    waiting=self._waiting.told(),
                    cpu_ns=self._cpu_ns - before,
                )
        if not outputs:
            time.sleep(0.0002)  # nothing but waiting for KV: leave the core to others


class _Steps:
    """How many there were of a kind, and the CPU that hooks took in them (ns)."""

    def __init__(self) -> None:
        self._count, self._hooks_ns = 0, 0.0

    def add(self, hooks_ns: float) -> None:
        """One more."""
        self._count += 1
        self._hooks_ns += hooks_ns

    def told(self) -> tuple[int, float]:
        """Those since this was asked last."""
        found = self._count, self._hooks_ns
        self._count, self._hooks_ns = 0, 0.0
        return found


class _Hooks:
    """The CPU that a connector's hooks take."""

    def __init__(self) -> None:
        #: Time of each hook (ns), and how often it was called, since it was asked for last.
        self._spent: dict[str, list[int]] = {name: [0, 0] for names in _HOOKS for name in names}
        #: The same of the one that does nothing, over all the time.
        self._nothing = [0, 0]

    def time(self, *connectors: object) -> None:
        """Time the hooks of these from now on."""
        for connector in connectors:
            for name, spent in self._spent.items():
                setattr(connector, name, _timed(getattr(connector, name), spent))

    def taken(self) -> float:
        """Time that they took since this was asked last (ns), without that of looking at the clock."""
        for index, value in enumerate(self._spent[_NOTHING]):
            self._nothing[index] += value
        clock_ns = self._nothing[0] / max(1, self._nothing[1])
        taken = sum(spent - calls * clock_ns for spent, calls in self._spent.values())
        for spent in self._spent.values():
            spent[:] = [0, 0]
        return taken


def _timed(hook: Callable[..., Any], spent: list[int]) -> Callable[..., Any]:
    @wraps(hook)
    def timed(*args: object, **named: object) -> object:
        began = time.thread_time_ns()
        try:
            return hook(*args, **named)
        finally:
            spent[0] += time.thread_time_ns() - began
            spent[1] += 1

    return timed
