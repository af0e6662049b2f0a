"""The CPU that a connector's hooks take in vLLM's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from statistics import median
from typing import Any

__all__ = ["Hooks", "Steps"]

#: What vLLM calls of a connector in each step, beside its scheduler and in its worker.
_HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "take_events", "has_pending_push_work"),
    *("handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"),
    *("get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
    "build_connector_worker_meta",
)
#: Called for each layer, in the midst of the model's work, which leaves the caches to nobody else.
_OF_LAYERS = frozenset({"wait_for_layer_load", "save_kv_layer"})
#: One of those that does nothing: its time is that of looking at the clock there.
_NOTHING = "wait_for_layer_load"


class Hooks:
    """Times them, without what it takes to look at the clock."""

    def __init__(self) -> None:
        #: Time of each hook (ns), and how often it was called, since it was asked for last.
        self._spent: dict[str, list[int]] = {name: [0, 0] for name in _HOOKS}
        #: The same of the one that does nothing, over all the time.
        self._nothing = [0, 0]
        self._clock_ns = _clock_ns()

    def time(self, *connectors: object) -> None:
        """Time the hooks of these from now on."""
        for connector in connectors:
            for name, spent in self._spent.items():
                setattr(connector, name, _timed(getattr(connector, name), spent))

    def taken(self) -> dict[str, float]:
        """Time that each took since this was asked last (ns)."""
        for index, value in enumerate(self._spent[_NOTHING]):
            self._nothing[index] += value
        among_layers_ns = self._nothing[0] / max(1, self._nothing[1])
        found = {}
        for name, spent in self._spent.items():
            found[name] = spent[0] - spent[1] * (among_layers_ns if name in _OF_LAYERS else self._clock_ns)
            spent[:] = [0, 0]
        return found


class Steps:
    """How many there were of a kind, and the CPU that each hook took in them."""

    def __init__(self) -> None:
        self._count = 0
        self._hooks_ns: dict[str, float] = {}

    def add(self, hooks_ns: Mapping[str, float]) -> None:
        """One more."""
        self._count += 1
        for name, value in hooks_ns.items():
            self._hooks_ns[name] = self._hooks_ns.get(name, 0.0) + value

    def told(self) -> tuple[int, dict[str, float]]:
        """How many since this was asked last, and the time of each hook in one of them (us)."""
        count, hooks_ns = self._count, self._hooks_ns
        self._count, self._hooks_ns = 0, {}
        return count, {name: value / count / 1e3 for name, value in hooks_ns.items()}


def _timed(hook: Callable[..., Any], spent: list[int]) -> Callable[..., Any]:
    @wraps(hook)
    def timed(*args: object, **named: object) -> object:
        began = time.thread_time_ns()
        try:
            return hook(*args, **named)
        finally:
            spent[0] += time.thread_time_ns() - began
            spent[1] += 1

    return timed


def _clock_ns() -> float:
    """What a hook that does nothing seems to take, where nothing else is done."""
    found = []
    for _ in range(1000):
        began = time.thread_time_ns()
        found.append(time.thread_time_ns() - began)
    return median(found)
