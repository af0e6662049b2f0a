"""A vLLM in a process of its own, with a small model: told requests, it says when their tokens came."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiokv.bench.child import Line
from aiokv.bench.hooks import Hooks, Steps

__all__ = ["ENVIRONMENT", "FUNCTION", "make_model", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.inference:serve"

#: One core for each instance, and no process beside it.
ENVIRONMENT = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


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
        cores = os.sched_getaffinity(0)
        llm = LLM(
            model,
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=2048,
            **options,
        )
        # On CPUs vLLM's NixlConnector ties this thread, which computes, to one core, as it does the other's.
        os.sched_setaffinity(0, cores)
        self._sampling = SamplingParams
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._line = line
        self._wake = asyncio.Event()
        #: When the first and the last token of each request came (ns).
        self._times: dict[str, list[int]] = {}
        #: Of steps that computed something, and of those that only waited for KV.
        self._computing, self._waiting = Steps(), Steps()
        #: CPU of the process when it was told last (ns).
        self._cpu_ns = time.process_time_ns()
        #: Whether the last step computed something.
        self._computed = False
        self._scheduler.schedule = self._noted(self._scheduler.schedule)
        self._hooks = Hooks()
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
