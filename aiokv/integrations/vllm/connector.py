"""``AioKVConnector``: what vLLM calls. It translates, and leaves the rest to the two halves.

vLLM makes it twice: once beside its scheduler and once in each worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from aiokv.device.cache import KVCache
from aiokv.integrations.vllm import reading
from aiokv.integrations.vllm.asking import Asking
from aiokv.integrations.vllm.figures import Endpoint, Figures
from aiokv.integrations.vllm.keeping import Keeping
from aiokv.integrations.vllm.kvevents import kv_event
from aiokv.integrations.vllm.layout import cache_layout, layer_order, rank_heads
from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.news import News
from aiokv.integrations.vllm.orders import Orders
from aiokv.integrations.vllm.scheduler import SchedulerHalf
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.stretches import Stretches
from aiokv.integrations.vllm.worker import WorkerHalf
from aiokv.offload.sharing.lookout import Lookout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from aiokv.offload.statistics import TierStatistics

__all__ = ["Address", "AioKVConnector", "Metadata", "WorkerNews"]

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of one step, on their way to the workers."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers have to tell, on its way to the scheduler."""

    news: list[News]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """That of other workers, too."""
        return WorkerNews([*self.news, *other.news])


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker's engine is reached, and what it finds in a pool, on its way to the scheduler."""

    address: str
    digest: bytes | None = None


class AioKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves KV between instances of vLLM, and between one and its host's memory, by aiokv.

    Prefill sides offer what a request left behind and hold its blocks until it was fetched; decode sides
    fetch it while other requests are computed. A host tier keeps what was computed or fetched, and brings
    back what vLLM's own cache has lost.

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
        self._settings = ConnectorSettings.read(transfer.kv_connector_extra_config)
        reading.check(vllm_config, self._settings)
        self._groups = [
            reading.group_of(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        #: The worker's half; None beside the scheduler, and until the caches are registered.
        self._worker: WorkerHalf | None = None
        #: Blocks whose load failed, not yet told.
        self._invalid: set[int] = set()
        self._figures = Figures()
        #: The host tier's counts when they were last looked at.
        self._counted: TierStatistics | None = None
        sizes = [group.block_size for group in self._groups]
        events = vllm_config.kv_events_config
        tier = None
        if self._settings.keeps:
            told = events is not None and events.enable_kv_cache_events
            windows = [group.window for group in self._groups]
            stretches = Stretches(sizes, windows, reading.hash_tokens(vllm_config, kv_cache_config))
            tier = Keeping(stretches, parallel.tensor_parallel_size, events=told)
        #: The scheduler's half; idle in a worker.
        settings = self._settings
        # Blocks before a sliding window are given up while a prompt is computed.
        kept = not any(group.window for group in self._groups)
        leaving = Leaving(
            sizes,
            str(transfer.engine_id),
            layerwise=settings.layerwise and kept,
            chunks=settings.chunks and kept,
            ranks=parallel.tensor_parallel_size,
            hold=settings.hold,
        )
        self._scheduler = SchedulerHalf(sizes, leaving, tier)
        #: Numbers of layers, by name; empty until the caches are registered, and where nobody asks for them.
        self._layers: dict[str, int] = {}

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
            model=reading.fingerprint(config, self._settings.model, kv_caches),
        )
        if self._settings.layerwise:
            names = layer_order([name for group in self._groups for name in group.layers])
            self._layers = {name: layer for layer, name in enumerate(names)}
        cache = KVCache.from_tensors(layout, tensors)
        try:
            self._worker = WorkerHalf(
                cache, self._settings, rank, ranks, weights=reading.weights(config, self._settings.model)
            )
        except BaseException:
            cache.close()
            raise

    def get_handshake_metadata(self) -> Address | None:
        """Where this worker is reached."""
        worker = self._worker
        return None if worker is None else Address(worker.address, worker.digest)

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        """Before a step writes anything: nobody may be reading what it writes to; and begin to send."""
        if self._worker is not None:
            self._worker.before(kv_connector_metadata.orders, reading.compute_stream)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Begin what the scheduler ordered in this step."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and metadata.orders:
            self._worker.carry_out(metadata.orders, reading.compute_stream())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs once all of it was loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """A layer is computed, which may be sent from now on; blocks are offered where they are."""
        if not self._layers:  # it is called often
            return
        layer = self._layers.get(layer_name)
        if self._worker is not None and layer is not None:
            self._worker.written(layer, reading.compute_stream)

    def wait_for_save(self) -> None:
        """All layers are computed: begin to copy to the host tier what the step has filled."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.computed(self._get_connector_metadata().orders, reading.compute_stream)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What came to an end since the last step."""
        found = KVConnectorTransferResults()
        if self._worker is None or (outcome := self._worker.outcome()) is None:
            return found
        self._figures.add(outcome)
        found.finished_sending, found.finished_recving = outcome.sent, outcome.loaded
        for name, blocks in outcome.failed.items():
            if len(self._groups) == 1 and not self._groups[0].window:
                self._invalid.update(block for each in blocks for block in each.ids)
            else:
                # An id would stand for a block of each group. And what vLLM would compute from the first such
                # block on reaches back, by a window, to blocks that it has given up already.
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
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are told one by one only between graphs; by whole ones they are sent after the step."""
        return bool(extra_config.get("layerwise"))

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

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """What changed in the host tier, and what is asked for."""
        if self._worker is None or (news := self._worker.news()) is None:
            return None
        before, self._counted = self._counted, self._worker.tier_statistics()
        if self._counted is not None:
            self._figures.add_tier(before, self._counted)
        return WorkerNews([news])

    def shutdown(self) -> None:
        """Close the transfer engine; peers are told."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._scheduler.close()

    # -- beside the scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Take note of where the workers are."""
        told = [metadata[rank] for rank in sorted(metadata)]
        self._scheduler.leaving.addresses = tuple(each.address for each in told)
        if self._settings.host_pool is not None:
            digests = [each.digest for each in told]
            self._scheduler.share(Asking(Lookout(self._settings.host_pool, digests)))

    def on_new_request(self, request: Request) -> None:
        """A request is in the queue: what it will fetch is to be held until then, or asked for in a pool."""
        self._scheduler.added(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: a request's own blocks are fetched."""
        return tuple(range(len(self._groups)))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, always in the background; None: not known yet, or others load them."""
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks: load into them what is to be loaded."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """How many tokens come from the host tier, and how many from a prefill side."""
        host, peers = self._scheduler.sources(request, num_external_tokens)
        found = {CacheHitSource.HOST: host, CacheHitSource.P2P: peers}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        """What the workers are to do in this step."""
        if not self._scheduler.follows:
            return Metadata(self._scheduler.orders())
        cached = scheduler_output.scheduled_cached_reqs
        self._scheduler.preempted(scheduler_output.preempted_req_ids or ())
        # Those that are new or resumed were told of all their blocks when they got them.
        more = {
            name: new
            for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if new is not None and name not in cached.resumed_req_ids
        }
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            self._scheduler.scheduled(name, tokens, more.get(name, ()))
        return Metadata(self._scheduler.orders())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers reported."""
        told = connector_output.kv_connector_worker_meta
        news = told.news if isinstance(told, WorkerNews) else ()
        self._scheduler.reported(connector_output.finished_recving or (), news)

    def take_events(self) -> list[KVCacheEvent]:
        """What came to be in the host tier, and what went."""
        return [kv_event(change) for change in self._scheduler.take_changes()]

    def reset_cache(self) -> bool | None:
        """Empty the host tier; False if a request is waiting for what was in it, None without a tier."""
        return self._scheduler.reset()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; see ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: hold its blocks where they are to be fetched."""
        return self._scheduler.finished(request, block_ids, complete=request.status in _COMPLETE)

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed to tell the workers what was decided, or to hear of them."""
        return self._scheduler.pending
