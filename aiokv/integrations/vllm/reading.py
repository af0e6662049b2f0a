"""What is read of vLLM's configuration, and of the device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from aiokv.integrations.vllm.layout import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from aiokv.integrations.vllm.settings import ConnectorSettings

__all__ = ["check", "compute_stream", "fingerprint", "group_of", "hash_tokens", "weights"]


def check(config: VllmConfig, settings: ConnectorSettings) -> None:
    """Refuse what the connector can't do.

    Raises:
        ValueError: The message names the field, and what mends it.
    """
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("AioKVConnector: pipeline parallelism is not supported")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("AioKVConnector: context parallelism is not supported")
    if settings.keeps and config.kv_transfer_config.kv_load_failure_policy != "recompute":
        field = "host_tier" if settings.host_pool is None else "host_pool"
        raise ValueError(
            f"AioKVConnector: what the host tier has lost is computed again, so {field} needs "
            '"kv_load_failure_policy": "recompute"'
        )
    if config.model_config.enable_sleep_mode:
        raise ValueError(
            "AioKVConnector: peers may read the KV cache at any time, so --enable-sleep-mode can't be had"
        )
    if settings.host_pool is not None:
        _check_pool(config)
    if settings.layerwise and parallel.enable_dbo:
        raise ValueError("AioKVConnector: layerwise can't be had with --enable-dbo, which halves batches")


def _check_pool(config: VllmConfig) -> None:
    if config.parallel_config.nnodes_within_dp > 1:
        raise ValueError("AioKVConnector: host_pool is for instances of which all ranks are on one host")
    algorithm = config.cache_config.prefix_caching_hash_algo
    if "xxhash" in algorithm and os.getenv("PYTHONHASHSEED") is None:
        raise ValueError(
            f"AioKVConnector: by --prefix-caching-hash-algo {algorithm} each instance has its own hashes, "
            "so none finds another's blocks in host_pool: use sha256_cbor, or set PYTHONHASHSEED to the same "
            "for all of them"
        )


def group_of(index: int, group: KVCacheGroupSpec) -> Group:
    """What we need to know of one of vLLM's groups; raises ValueError where we can't move its kind."""
    spec, names = group.kv_cache_spec, tuple(group.layer_names)
    if isinstance(spec, MLAAttentionSpec):
        return Group(names, spec.block_size, 1, spec.head_size, "mla")
    if type(spec) in (FullAttentionSpec, SlidingWindowSpec):
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
        kind = "window" if window else "attention"
        return Group(names, spec.block_size, spec.num_kv_heads, spec.head_size, kind, window)  # type: ignore[arg-type]
    raise ValueError(
        f"AioKVConnector: KV cache group {index} is of {type(spec).__name__}, which is not supported"
    )


def fingerprint(vllm_config: VllmConfig, given: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What both sides must have in common; not the name, which may be a path of this host."""
    config, hf = vllm_config.model_config, vllm_config.model_config.hf_text_config
    # On CPUs the kernels decide how a block is laid out within, by its size and by what the CPU can do.
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.values())
    inner = (vllm_config.cache_config.block_size, torch.backends.cpu.get_cpu_capability()) if on_cpu else ()
    facts = (
        inner,
        given,
        getattr(hf, "model_type", ""),
        getattr(hf, "hidden_size", 0),
        getattr(hf, "num_hidden_layers", 0),
        getattr(hf, "vocab_size", 0),
        config.quantization,
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens by which vLLM's hashes of a request follow each other."""
    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(tokens)


def weights(vllm_config: VllmConfig, given: str) -> bytes:
    """What instances must have in common to use each other's blocks in a pool: the very weights.

    Unlike of two sides that somebody has put together, nobody says that all who use a pool have the same. So
    the name counts, by which they were found: where it differs nothing is shared.
    """
    config = vllm_config.model_config
    return hashlib.sha256(repr((config.model, config.revision, given)).encode()).digest()


def compute_stream() -> object | None:
    """The stream that the model computes on; None on a CPU."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None
