"""What of vLLM's configuration is refused at start, by its own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiokv.integrations.vllm.settings import ConnectorSettings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # what vLLM imports warns


def config(policy: str = "recompute", sleep: bool = False, **parallel: object) -> Any:
    """What is looked at of a ``VllmConfig``."""
    ranks = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes_within_dp": 1,
        "enable_dbo": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(ranks | parallel)),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
    )


@pytest.mark.parametrize(
    ("given", "extra", "message"),
    [
        (config(pipeline_parallel_size=2), {}, "pipeline"),
        (config(decode_context_parallel_size=2), {}, "context parallelism"),
        (config("fail"), {"host_tier": "1GiB"}, 'host_tier needs "kv_load_failure_policy": "recompute"'),
        (config(sleep=True), {}, "--enable-sleep-mode"),
        (config(enable_dbo=True), {"layerwise": True}, "--enable-dbo"),
    ],
)
def test_what_it_can_t_do_is_named(given: Any, extra: dict[str, object], message: str) -> None:
    from aiokv.integrations.vllm.reading import check

    check(config(), ConnectorSettings.read(extra))
    with pytest.raises(ValueError, match=message):
        check(given, ConnectorSettings.read(extra))


def test_groups_that_can_t_be_moved() -> None:
    import torch
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    from aiokv.integrations.vllm.reading import group_of

    def read(spec: Any) -> Any:
        return group_of(0, SimpleNamespace(kv_cache_spec=spec, layer_names=["layer.0"]))

    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    assert read(FullAttentionSpec(**sizes)).kind == "attention"
    windowed = read(SlidingWindowSpec(**sizes, sliding_window=128))
    assert (windowed.kind, windowed.window) == ("window", 128)
    with pytest.raises(ValueError, match="group 0 is of CrossAttentionSpec"):
        read(CrossAttentionSpec(**sizes))
