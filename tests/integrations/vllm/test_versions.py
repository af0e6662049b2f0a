from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from aiokv.integrations.vllm.versions import SUPPORTED, check_complete, check_version


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1.dev5+g0123abc.cpu"])
def test_supported_ones_are_taken(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.2", "0.9.1", "0.3.20"])
def test_older_ones_are_refused(version: str) -> None:
    with pytest.raises(
        ImportError, match=rf"made for vLLM 0\.32 and 0\.33; this is {version}, which is older"
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["0.34.0", "0.100.0", "1.0.0", "dev", "0.1.dev1+g0123abc"])
def test_with_newer_and_unknown_ones_it_warns(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version)
    (record,) = caplog.records
    assert (
        record.getMessage()
        == f"AioKVConnector is made for vLLM 0.32 and 0.33, and was never tried with {version}"
    )


def test_what_is_asked_for_beyond_is_named() -> None:
    class Base(ABC):
        @abstractmethod
        def levitate(self) -> None: ...

    class Connector(Base):
        pass

    with pytest.raises(
        ImportError, match=r"0\.32 and 0\.33; this is 0\.34\.0, which differs: it asks for levitate"
    ):
        check_complete(Connector, "0.34.0")
    check_complete(object, SUPPORTED[0])
