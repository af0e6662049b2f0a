"""The copy engine on a real GPU: every way, for fragments of every size, beside a plain one on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aiokv.device.cuda import CudaDevice
from aiokv.device.cudacosts import DIRECTIONS, PATHS
from aiokv.device.cudaends import End, Fragments, Move
from aiokv.device.host import HostBuffer
from aiokv.proto.plan import Section

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it waits for the GPU")]

TOTAL = 12 << 20


def section_of(size: int, loops: tuple[int, ...], seed: int) -> Section:
    """Pieces of ``loops`` runs of ``size`` bytes, scattered in a memory of twice the size on both sides."""
    random = np.random.default_rng(seed)
    run, steps, span = size, [], size
    for count in reversed(loops):
        steps.insert(0, 2 * span)
        span = (count - 1) * 2 * span + span
    piece = size * int(np.prod(loops, dtype=np.int64))
    count = max(1, TOTAL // piece // 2)
    places = random.permutation(count).astype(np.int64) * 2 * span
    others = random.permutation(count).astype(np.int64) * 2 * span
    return Section(places, others, loops, tuple(steps), tuple(steps), run)


def moved(section: Section, source: np.ndarray, target: np.ndarray, *, packed: str) -> np.ndarray:
    src, dst, lengths = section.extents(0, len(section.src))
    at = np.cumsum(lengths) - lengths
    src, dst = (at if packed == "src" else src), (at if packed == "dst" else dst)
    wanted = target.copy()
    for a, b, size in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        wanted[b : b + size] = source[a : a + size]
    return wanted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("size", "loops"),
    [
        (4096, ()),
        (65536, ()),
        (2 << 20, ()),
        (1000, ()),
        (999, ()),
        (512, (16, 4)),
        (36, (3, 5)),
        (33, (2, 2, 3)),
    ],
)
def test_every_way(
    device: CudaDevice, path: str, direction: str, size: int, loops: tuple[int, ...], seed: int
) -> None:
    section = section_of(size, loops, seed)
    if path in ("plain", "batch") and len(section.src) * int(np.prod(loops)) > 40_000:
        pytest.skip("one DMA for each of so many fragments proves nothing new")
    reach = max(section.src_reach, section.dst_reach)
    gpu, host = device.allocate(reach), device.pin_now(HostBuffer.allocate(reach))
    random = np.random.default_rng(seed)
    here = random.integers(0, 256, reach, dtype=np.uint8)
    there = random.integers(0, 256, reach, dtype=np.uint8)
    gpu.tensor().copy_(torch.from_numpy(there))
    np.frombuffer(host.view, np.uint8)[:] = here
    torch.cuda.synchronize()
    on_gpu, on_host = End.at(gpu, 0, packed=False), End.at(host, 0, packed=True)
    to_host = direction == "to_host"
    ends = (on_gpu, on_host) if to_host else (on_host, on_gpu)
    move = Move(section, 0, len(section.src), *ends, Fragments(section))
    stream = device.stream()
    device._engine.run(move, stream, path)
    device._engine.run(move, stream, path)  # the second comes while the first is under way
    torch.cuda.synchronize()
    assert stream.record().done()
    if to_host:
        wanted, found = moved(section, there, here, packed="dst"), np.frombuffer(host.view, np.uint8)
    else:
        wanted, found = moved(section, here, there, packed="src"), gpu.tensor().cpu().numpy()
    assert (wanted == found).all()
    gpu.close()
    host.close()


def test_both_directions_at_once_keep_apart(device: CudaDevice, seed: int) -> None:
    section = section_of(4096, (), seed)
    reach = max(section.src_reach, section.dst_reach)
    source, target = device.allocate(reach), device.allocate(reach)
    random = np.random.default_rng(seed)
    noise = random.integers(0, 256, reach, dtype=np.uint8)
    source.tensor().copy_(torch.from_numpy(noise))
    out, back = (device.pin_now(HostBuffer.allocate(reach)) for _ in range(2))
    np.frombuffer(back.view, np.uint8)[:] = noise[::-1]
    torch.cuda.synchronize()
    fragments = Fragments(section)
    streams, count = [device.stream(), device.stream()], len(section.src)
    for lo in range(0, count, 97):
        hi, past = min(lo + 97, count), lo * section.run
        there, here = End.at(out, past, packed=True), End.at(back, past, packed=True)
        gpu = End.at(source, 0, packed=False)
        device._engine.run(Move(section, lo, hi, gpu, there, fragments), streams[0], "staged")
        device._engine.run(
            Move(section, lo, hi, here, End.at(target, 0, packed=False), fragments), streams[1], "staged"
        )
    torch.cuda.synchronize()
    wanted = moved(section, noise, np.zeros(reach, np.uint8), packed="dst")
    size = count * section.run
    assert (np.frombuffer(out.view, np.uint8)[:size] == wanted[:size]).all()
    wanted = moved(section, noise[::-1], np.zeros(reach, np.uint8), packed="src")
    assert (target.tensor().cpu().numpy() == wanted).all()
    for buffer in (source, target, out, back):
        buffer.close()


def test_costs_are_measured_and_can_be_read(device: CudaDevice) -> None:
    for direction in DIRECTIONS:
        table = getattr(device.costs, direction)
        assert set(table) == set(PATHS)
        # Whatever this machine is like: one DMA for each of very many small fragments is the worst.
        assert table["plain"].of(4096, 1 << 24) > table["staged"].of(4096, 1 << 24)
    assert "to_device staged" in str(device.costs)
