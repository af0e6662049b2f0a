"""One vLLM in a process of its own, told what to do by lines of JSON: a program, which the tests start.

    python instance.py MODEL KV_TRANSFER_CONFIG OPTIONS

Requests are added and aborted between steps, as a server would do it; each event goes to stdout as a line
that begins with ``@``. An empty configuration is vLLM alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


def tell(**event: Any) -> None:
    print("@" + json.dumps(event), flush=True)


class Instance:
    def __init__(self, model: str, transfer: str | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        if transfer:
            options["kv_transfer_config"] = KVTransferConfig(**json.loads(transfer))
            options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.engine = LLM(
            model,
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=1024,
            max_num_seqs=32,
            **options,
        ).llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **named: Any) -> None:
            self.preempted += 1
            preempt(*args, **named)

        self.scheduler._preempt_request = counted
        #: Layers that were told while those behind them were computed.
        self.layers = 0
        #: Chunks that were sent before the last of their prompts.
        self.chunks = 0
        if transfer:
            self.count_chunks()
        if transfer and "tensor_parallel_size" not in options:  # else workers are processes of their own
            self.count_layers()
            self.note_blocks()
        #: Blocks of host memory, by hash, as a router that goes by KV events has them.
        self.resident: dict[bytes, list[int]] = {}
        self.scheduler.kv_event_publisher.publish = self.publish

    def count_chunks(self) -> None:
        half = self.scheduler.connector._scheduler
        orders = half.orders

        def counted() -> Any:
            found = orders()
            self.chunks += sum(not send.last for send in found.sends)
            return found

        half.orders = counted

    def count_layers(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        written = worker.written

        def counted(layer: int, stream: Any) -> None:
            self.layers += bool(worker._sending.announcing)
            written(layer, stream)

        worker.written = counted

    def note_blocks(self) -> None:
        """Keep in mind which blocks each request got; what is in them stays until others get them."""
        self.blocks: dict[str, list[int]] = {}
        connector = self.scheduler.connector
        allocated = connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, tokens: int) -> None:
            self.blocks[request.request_id] = blocks.get_block_ids()[0]
            allocated(request, blocks, tokens)

        connector.update_state_after_alloc = noted

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != "CPU":
                continue
            if type(event).__name__ == "BlockRemoved":
                for block in event.block_hashes:
                    del self.resident[block]
                continue
            for at, block in enumerate(event.block_hashes):
                self.resident[block] = event.token_ids[at * event.block_size :][: event.block_size]

    def run(self) -> None:
        tell(event="up")
        rest = b""
        while True:
            busy = self.scheduler.has_requests() or self.engine.has_unfinished_requests()
            if select.select([0], [], [], 0 if busy else None)[0]:
                data = os.read(0, 1 << 20)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.told(**json.loads(line))
            if busy:
                self.step()

    def step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                tell(
                    event="over",
                    name=output.request_id,
                    tokens=list(output.outputs[0].token_ids),
                    reason=output.outputs[0].finish_reason,
                    cached=output.num_cached_tokens,
                    params=output.kv_transfer_params,
                )
        if not outputs:
            time.sleep(0.001)  # nothing but waiting for KV: leave the core to others

    def told(self, do: str, **given: Any) -> None:
        getattr(self, "do_" + do)(**given)

    def do_add(self, name: str, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def do_abort(self, name: str) -> None:
        self.engine.abort_request([name])
        tell(event="aborted", name=name)

    def do_state(self) -> None:
        """Blocks that are held, and requests that the scheduler knows."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        tell(
            event="state",
            held=pool.num_gpu_blocks - 1 - free,
            requests=sorted(self.scheduler.requests),
            preempted=self.preempted,
            layers=self.layers,
            chunks=self.chunks,
            groups=len(self.scheduler.kv_cache_config.kv_cache_groups),
        )

    def do_figures(self) -> None:
        """What vLLM's Prometheus endpoint shows of the connector."""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        tell(event="figures", **{each.name: each.value for each in samples if "aiokv" in each.name})

    def do_content(self, name: str, count: int) -> None:
        """What the first blocks of a request hold, in all layers, as a digest of each; one KV cache group."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        cache = get_kv_transfer_group()._worker._cache
        ids = next(ids for key, ids in self.blocks.items() if key == name or key.startswith(f"{name}-"))
        tensors = [cache.tensor(layer) for layer in range(cache.layout.layers)]
        axis = cache.layout.groups[0].axes.index("b")
        found = [
            hashlib.sha256(
                b"".join(each.select(axis, block).contiguous().numpy().tobytes() for each in tensors)
            )
            for block in ids[:count]
        ]
        tell(event="content", blocks=[each.hexdigest() for each in found])

    def do_told(self) -> None:
        """What KV events said to be in host memory."""
        tell(event="told", blocks=list(self.resident.values()))

    def do_reset(self, connector: bool = False) -> None:
        tell(event="reset", well=self.engine.reset_prefix_cache(reset_connector=connector))


if __name__ == "__main__":
    model, transfer, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    Instance(model, transfer, **options).run()
