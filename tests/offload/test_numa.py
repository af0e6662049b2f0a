"""CPUs near a GPU, as sysfs tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from aiokv.device.host import HostDevice
from aiokv.offload.numa import cpus_near, cpus_of


def gpu(bus: str = "0000:3B:00.0") -> SimpleNamespace:
    runtime = SimpleNamespace(deviceGetPCIBusId=lambda ordinal: bus)
    return SimpleNamespace(
        kind="cuda", context=SimpleNamespace(ordinal=0, cuda=SimpleNamespace(runtime=runtime))
    )


def system(root: Path, nodes: int, node: str) -> Path:
    for index in range(nodes):
        folder = root / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{index * 4}-{index * 4 + 2},{index * 4 + 3}\n")
    device = root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    return root


def test_the_node_of_the_gpu(tmp_path: Path) -> None:
    assert cpus_near(gpu(), system(tmp_path, 2, "1\n")) == {4, 5, 6, 7}


@pytest.mark.parametrize(("nodes", "node"), [(1, "0"), (2, "-1"), (2, "7"), (2, "what")])
def test_where_there_is_nothing_to_choose(tmp_path: Path, nodes: int, node: str) -> None:
    assert cpus_near(gpu(), system(tmp_path, nodes, node)) == set()


def test_no_gpu_has_no_node(tmp_path: Path) -> None:
    assert cpus_near(HostDevice(), system(tmp_path, 2, "1")) == set()
    assert cpus_near(gpu("0000:00:00.0"), tmp_path / "none") == set()


def test_lists_of_cpus() -> None:
    assert cpus_of("0-2,8\n") == {0, 1, 2, 8}
    assert cpus_of("") == set()
    with pytest.raises(ValueError):
        cpus_of("0-x")
