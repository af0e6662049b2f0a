"""A KV connector for vLLM: ``--kv-transfer-config '{"kv_connector": "AioKVConnector", ...}'``.

The scheduler's half decides (``scheduler.py``), the worker's half carries out (``worker.py``), and what the
one tells the other is in ``orders.py``. Only ``connector.py`` imports vLLM, and it is imported when the class
is asked for: everything else works, and is tested, without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.integrations.vllm.connector import AioKVConnector

__all__ = ["AioKVConnector"]


def __getattr__(name: str) -> object:
    """The connector's class, which needs vLLM, once somebody asks for it."""
    if name == "AioKVConnector":
        return _connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _connector() -> type:
    from aiokv.integrations.vllm import versions

    try:
        from vllm import __version__
    except ImportError as error:
        raise versions.missing(error) from error
    versions.check_version(__version__)
    try:
        from aiokv.integrations.vllm.connector import AioKVConnector
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise  # not vLLM's fault
        raise versions.differs(__version__, error) from error
    versions.check_complete(AioKVConnector, __version__)
    return AioKVConnector
