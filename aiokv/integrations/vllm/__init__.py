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

#: Versions of vLLM that the connector is tested with.
SUPPORTED = "0.32"


def __getattr__(name: str) -> object:
    """The connector's class, which needs vLLM, once somebody asks for it."""
    if name == "AioKVConnector":
        try:
            from aiokv.integrations.vllm.connector import AioKVConnector
        except ImportError as error:
            raise ImportError(
                f"AioKVConnector is made for vLLM {SUPPORTED}, which isn't here: {error}"
            ) from error
        return AioKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
