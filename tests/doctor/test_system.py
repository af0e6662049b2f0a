"""What the doctor says of the kernel, limits and ports."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiokv.device import timer
from aiokv.doctor import system
from aiokv.doctor.system import guards, limits, network, sharing, timers

HAS_ALL = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def proc(tmp_path: Path, *, scope: str = "", seccomp: int = 0, capable: bool = False) -> Path:
    """A /proc that says so."""
    yama = tmp_path / "proc/sys/kernel/yama"
    (tmp_path / "proc/self").mkdir(parents=True)
    yama.mkdir(parents=True)
    if scope:
        (yama / "ptrace_scope").write_text(f"{scope}\n")
    caps = f"{1 << 19 if capable else 0:016x}"
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{caps}\nSeccomp:\t{seccomp}\n")
    return tmp_path / "proc"


def test_yama_is_named_with_what_turns_it_off(tmp_path: Path) -> None:
    found, mend = guards(proc(tmp_path, scope="1"))
    assert "ptrace_scope is 1" in found
    assert mend == "sysctl -w kernel.yama.ptrace_scope=0"


def test_yama_does_not_bind_who_has_the_capability(tmp_path: Path) -> None:
    assert guards(proc(tmp_path, scope="1", capable=True)) == ("", "")


def test_the_strictest_yama_stays_until_the_next_boot(tmp_path: Path) -> None:
    found, mend = guards(proc(tmp_path, scope="3", capable=True))
    assert "next boot" in found
    assert mend.startswith("boot with")


def test_a_container_s_filter_is_named(tmp_path: Path) -> None:
    path = proc(tmp_path, seccomp=2)
    (tmp_path / ".dockerenv").touch()
    found, mend = guards(path)
    assert "seccomp" in found
    assert "container" in found
    assert "--cap-add SYS_PTRACE" in mend


def test_where_nothing_says_so_it_may_be_the_user(tmp_path: Path) -> None:
    found, mend = guards(tmp_path / "nowhere")
    assert found == ""
    assert "one user" in mend


@pytest.mark.skipif(not HAS_ALL, reason="Linux only")
def test_shared_memory_and_other_processes_are_tried() -> None:
    memfd, cma, pidfd = sharing()
    assert memfd.state == pidfd.state == "ok"
    assert cma.name == "process_vm_readv"
    assert cma.state == "ok" or cma.mend


def test_a_refusal_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Operation not permitted\n")

    monkeypatch.setattr(system.subprocess, "run", refused)
    monkeypatch.setattr(system, "guards", lambda: ("; Yama", "sysctl"))
    _, cma, _ = sharing()
    assert (cma.state, cma.mend) == ("missing", "sysctl")
    assert "Operation not permitted; Yama" in cma.found


def test_what_only_linux_has_is_reported_and_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError("not here")

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(system, "_SO_PEERPIDFD", 9999)
    monkeypatch.setattr(system, "open_timerfd", absent)
    for each in (*sharing(), *timers()):
        assert each.state != "ok"
        assert not each.required
    assert timer.open_timerfd is not absent


def test_few_descriptors_are_told_with_what_gives_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, -1))
    descriptors, locked = limits()
    assert descriptors.state == locked.state == "weak"
    assert "256 (up to unlimited)" in descriptors.found
    assert "ulimit -n" in descriptors.mend
    assert "ulimit -l" in locked.mend
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert [each.state for each in limits()] == ["ok", "ok"]


def test_ports_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each.name: each for each in network()}
    assert found["loopback"].state == "ok"
    assert found["loopback"].required
    monkeypatch.setattr(system, "_outward", lambda: "")
    found = {each.name: each for each in network()}
    assert found["beyond loopback"].state == "missing"
    assert "--network host" in found["beyond loopback"].mend


def test_a_port_that_can_t_be_had_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refused)
    found = {each.name: each for each in network()}
    assert found["loopback"].state == "missing"
    assert "not permitted" in found["loopback"].found
