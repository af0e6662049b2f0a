"""What ``python -m aiokv pool`` refuses; that it serves is in ``offload/sharing/test_processes.py``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from aiokv.commands.pool import main


@pytest.mark.parametrize("address", ["9400", "host:", ":9400", "host:99999", "host:x"])
def test_an_address_that_can_not_be_meant(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "pool"), "--capacity", "1MiB", "--metrics", address])
    assert ended.value.code == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_what_can_not_be_had_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for capacity, word in (("much", "capacity"), ("0", "capacity")):
        assert main([str(tmp_path / "pool"), "--capacity", capacity]) == 2
        error = capsys.readouterr().err
        assert error.startswith("failed: ") and word in error
        assert error.count("\n") == 1


def test_metrics_where_somebody_listens_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([str(tmp_path / "pool"), "--capacity", "1MiB", "--metrics", address]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"failed: --metrics {address}: ")
    assert not (tmp_path / "pool").exists()
