"""The host tier of a GPU: batches of requests to the host and back, beside other ways and computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from statistics import median
from typing import Any

import uvloop

from aiokv.bench.cuda.gpu import Gpu, missing
from aiokv.bench.cuda.llama import BLOCK_TOKENS, Llama, block_ids
from aiokv.bench.figures import Spread, lowest, over
from aiokv.bench.offload.recompute import Forward
from aiokv.bench.offload.tiers import alone, at_once
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.device.cuda import CudaDevice
from aiokv.offload.tier import HostTier

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "offload.get_over_per_block": Goal(4, "higher"),
    "offload.get_over_pcie": Goal(0.90, "higher"),
    "offload.put_over_pcie": Goal(0.90, "higher"),
    "offload.convoy": Goal(1.2, "lower"),
}

_TOKENS = 4096
_REQUESTS = 8
_SHARING = 50
#: By name the KV heads of a rank: fragments are of K, or of V, of a block of 16 tokens.
_LAYOUTS = {"Llama-3-8B, fragments of 32 KiB": 8, "fragments of 8 KiB": 2}
#: Ways of copying, by what they are called here: what a device is made with; None is the usual one.
_WAYS: dict[str, dict[str, Any] | None] = {
    "aiokv": None,
    "aiokv, 24 MiB of staging": {"staging_bytes": 24 << 20},
    "cudaMemcpyAsync for each": {"path": "plain"},
    "cudaMemcpyBatchAsync": {"path": "batch"},
    "kernel, 8 blocks": {"path": "kernel"},
}
_SEED = 3

#: Seconds of the puts, and of the gets.
Times = tuple[list[float], list[float]]


class _Batch:
    """Some requests with nothing in common, and where each has its blocks."""

    def __init__(self, requests: int, blocks: int) -> None:
        each = _TOKENS // BLOCK_TOKENS
        ids = block_ids(2 * requests * _TOKENS, blocks, _SEED, scattered=True)
        self.hashes = [[f"{request}-{index}" for index in range(each)] for request in range(requests)]
        self.here = [ids[request * each : (request + 1) * each] for request in range(requests)]
        self.there = [
            ids[(requests + request) * each : (requests + request + 1) * each] for request in range(requests)
        ]
        self.count = requests * each


async def _put_and_get(tier: HostTier, batch: _Batch) -> tuple[float, float]:
    """Seconds to store all requests, and to load them into other blocks."""
    await tier.reset()
    began = time.perf_counter()
    kept = await asyncio.gather(*map(tier.store, batch.hashes, batch.here))
    put = time.perf_counter()
    await asyncio.gather(*map(alone, [tier] * len(kept), batch.hashes, batch.there))
    got = time.perf_counter()
    if sum(kept) != batch.count:
        raise RuntimeError(f"{sum(kept)} of {batch.count} blocks were kept")
    return put - began, got - put


def _pcie(gpu: Gpu, nbytes: int, rounds: int) -> Times:
    """One DMA of as many bytes, to the host and back."""
    device, host = gpu.device.allocate(nbytes), gpu.host_memory(nbytes)
    stream = gpu.stream()
    found: Times = [], []
    for number in range(rounds + 1):
        ends = ((host, device.address, 2), (device.address, host, 1))
        for kept, (dst, src, kind) in zip(found, ends, strict=True):
            began = time.perf_counter()
            gpu.runtime.memcpyAsync(dst, src, nbytes, kind, stream.ptr)
            gpu.runtime.streamSynchronize(stream.ptr)
            if number:
                kept.append(time.perf_counter() - began)
    device.close()
    return found


async def _way(
    gpu: Gpu, made: dict[str, Any] | None, heads: int, requests: int, rounds: int, report: Report | None
) -> tuple[Times, int]:
    """One way of copying: times, and bytes of a batch. Where there is a report, also requests that share."""
    blocks = 3 * requests * _TOKENS // BLOCK_TOKENS
    device = gpu.device if made is None else await asyncio.to_thread(CudaDevice, cuda=gpu.cuda, **made)
    llama = Llama(gpu, blocks, heads=heads, device=device)
    batch = _Batch(requests, blocks)
    llama.fill(_SEED)
    found: Times = [], []
    size = sum(group.block_bytes * len(group.layers) for group in llama.cache.layout.groups)
    async with HostTier(llama.cache, batch.count * size) as tier:
        await tier.grown()
        for number in range(rounds + 1):
            took = await _put_and_get(tier, batch)
            if number:
                for kept, seconds in zip(found, took, strict=True):
                    kept.append(seconds)
        here, there = ([*chain.from_iterable(each)] for each in (batch.here, batch.there))
        for floats in llama.tensors:
            tensor = floats.view(gpu.torch.int16)  # drawn at random, some are no numbers
            if not gpu.torch.equal(tensor[:, here], tensor[:, there]):
                raise RuntimeError(f"other bytes came back, by {made}")
        if report is not None:
            await _sharing(report, tier, batch.hashes[0], batch.there[0], rounds)
    llama.cache.close()
    if made is not None:
        await asyncio.to_thread(device.close)
    return found, batch.count * size


async def _sharing(
    report: Report, tier: HostTier, hashes: Sequence[str], blocks: Sequence[int], rounds: int
) -> None:
    one, last = [], []
    for number in range(3 * rounds + 1):
        first = await alone(tier, hashes, blocks)
        found = await at_once(tier, hashes, [blocks] * _SHARING)
        if number:
            one.append(first)
            last.append(found)
    report.row(
        f"{_SHARING} requests for one prefix of {_TOKENS} tokens",
        {
            "one alone ms": Spread.of(seconds * 1e3 for seconds in one),
            "the last of them ms": Spread.of(seconds * 1e3 for seconds in last),
        },
    )
    report.ratio("offload.convoy", over(last, one))


async def _run(report: Report, options: Options) -> None:
    requests, rounds = (2, 3) if options.quick else (_REQUESTS, 7)
    put: dict[str, list[float]] = {}
    get: dict[str, list[float]] = {}
    over_each: dict[str, list[float]] = {}
    ours_s = 0.0
    with closing(Gpu()) as gpu:
        for layout, heads in _LAYOUTS.items():
            times: dict[str, Times] = {}
            nbytes = 0
            for way, made in _WAYS.items():
                first = way == "aiokv" and heads == max(_LAYOUTS.values())
                times[way], nbytes = await _way(gpu, made, heads, requests, rounds, report if first else None)
            times["one DMA of as many bytes"] = _pcie(gpu, nbytes, rounds)
            for way, (puts, gets) in times.items():
                report.row(
                    f"{requests} requests of {_TOKENS} tokens at once",
                    {
                        "layout": layout,
                        "MiB": nbytes >> 20,
                        "by": way,
                        "put GB/s": Spread.of(nbytes / seconds / 1e9 for seconds in puts),
                        "get GB/s": Spread.of(nbytes / seconds / 1e9 for seconds in gets),
                        "get ms": Spread.of(seconds * 1e3 for seconds in gets),
                    },
                )
            ours, limit = times["aiokv"], times["one DMA of as many bytes"]
            put[layout], get[layout] = over(limit[0], ours[0]), over(limit[1], ours[1])
            over_each[layout] = over(times["cudaMemcpyAsync for each"][1], ours[1])
            ours_s = max(ours_s, median(ours[1]))
        forward = Forward(gpu)
        took = [forward.run(requests, _TOKENS) for _ in range(4)][1:]
        report.row(
            "to load them, or to compute them again",
            {
                "load ms": ours_s * 1e3,
                "forward of a model of 8B ms": Spread.of(seconds * 1e3 for seconds in took),
            },
        )
    report.ratio("offload.put_over_pcie", lowest(put))
    report.ratio("offload.get_over_pcie", lowest(get))
    report.ratio("offload.get_over_per_block", lowest(over_each))


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
