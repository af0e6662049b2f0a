"""``AioKVConnector``: what vLLM calls. It translates, and leaves the rest to the two halves.

vLLM makes it twice: once beside its scheduler and once in each worker.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from aiokv.device.cache import KVCache
from aiokv.integrations.vllm.figures import Endpoint, Figures
from aiokv.integrations.vllm.layout import Group, cache_layout, rank_heads
from aiokv.integrations.vllm.orders import Orders
from aiokv.integrations.vllm.scheduler import SchedulerHalf
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["Address", "AioKVConnector", "Metadata"]

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of one step, on their way to the workers."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker's engine is reached, on its way to the scheduler."""

    address: str


class AioKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves KV between instances of vLLM by aiokv.

    Prefill sides offer what a request left behind and hold its blocks until it was fetched; decode sides
    fetch it while other requests are computed.

    Args:
        vllm_config: vLLM's configuration; ``kv_connector_extra_config`` is read as ``ConnectorSettings``.
        role: Beside the scheduler, or in a worker.
        kv_cache_config: The KV cache groups.

    Raises:
        TypeError, ValueError: A field of the configuration can't be meant, or the model isn't supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("AioKVConnector: pipeline parallelism is not supported")
        self._settings = ConnectorSettings.read(transfer.kv_connector_extra_config)
        self._groups = [_group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
        #: The worker's half; None beside the scheduler, and until the caches are registered.
        self._worker: WorkerHalf | None = None
        #: Blocks whose load failed, not yet told.
        self._invalid: set[int] = set()
        self._figures = Figures()
        sizes = [group.block_size for group in self._groups]
        #: The scheduler's half; idle in a worker.
        self._scheduler = SchedulerHalf(sizes, str(transfer.engine_id))

    # -- in a worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Start the transfer engine on what vLLM allocated."""
        config: VllmConfig = self._vllm_config
        parallel = config.parallel_config
        ranks, rank = parallel.tensor_parallel_size, get_tensor_model_parallel_rank()
        total = config.model_config.get_total_num_kv_heads()
        layout, tensors = cache_layout(
            self._groups,
            kv_caches,
            heads=rank_heads(total, ranks, rank),
            total_heads=total,
            model=_fingerprint(config, self._settings.model, kv_caches),
        )
        cache = KVCache.from_tensors(layout, tensors)
        try:
            self._worker = WorkerHalf(cache, self._settings, rank, ranks)
        except BaseException:
            cache.close()
            raise

    def get_handshake_metadata(self) -> Address | None:
        """Where this worker is reached."""
        return Address(self._worker.address) if self._worker is not None else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Begin what the scheduler ordered in this step."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and metadata.orders:
            self._worker.carry_out(metadata.orders, _compute_stream())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs once all of it was loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Nothing: blocks are offered where they are."""

    def wait_for_save(self) -> None:
        """Nothing: blocks that are offered are held."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What came to an end since the last step."""
        found = KVConnectorTransferResults()
        if self._worker is None:
            return found
        outcome = self._worker.outcome()
        self._figures.add(outcome)
        found.finished_sending, found.finished_recving = outcome.sent, outcome.loaded
        for name, blocks in outcome.failed.items():
            if len(blocks) == 1:
                self._invalid.update(blocks[0].ids)
            else:  # an id would stand for a block of each group
                found.failed_recving.add(name)
        return found

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The same, for callers that know no failed requests."""
        found = self.get_transfer_results(finished_req_ids)
        return found.finished_sending, found.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads reported last that hold nothing."""
        found, self._invalid = self._invalid, set()
        return found

    def get_kv_connector_stats(self) -> Figures | None:
        """What happened since the last call; None where nothing did."""
        if self._figures.is_empty():
            return None
        found, self._figures = self._figures, Figures()
        return found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Figures:
        """Figures that came from another process."""
        return Figures(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Endpoint:
        """Figures in vLLM's Prometheus endpoint."""
        return Endpoint(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the transfer engine; peers are told."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # -- beside the scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Take note of where the workers are."""
        self._scheduler.addresses = tuple(metadata[rank].address for rank in sorted(metadata))

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: a request's own blocks are fetched."""
        return tuple(range(len(self._groups)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded; always in the background."""
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks: load into them what is to be loaded."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        """What the workers are to do in this step."""
        return Metadata(self._scheduler.orders())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers reported."""
        self._scheduler.reported(connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; see ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: hold its blocks where they are to be fetched."""
        return self._scheduler.finished(request, block_ids, complete=request.status in _COMPLETE)

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed to give the workers what was decided."""
        return self._scheduler.pending


def _group(index: int, group: KVCacheGroupSpec) -> Group:
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


def _fingerprint(vllm_config: VllmConfig, given: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
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


def _compute_stream() -> object | None:
    """The stream that the model computes on; None on a CPU."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None
