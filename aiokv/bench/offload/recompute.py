"""What loading saves: the forward of a random model as large as Llama-3-8B, by torch alone."""

from __future__ import annotations

import time
from typing import Any

from aiokv.bench.cuda.gpu import Gpu

__all__ = ["Forward"]

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD, _LAYERS = 4096, 14336, 32, 8, 128, 32


class Forward:
    """The layers of the model: attention, and the gated products; norms and positions are left out.

    Args:
        gpu: Where; 14 GB of weights.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._torch: Any = gpu.torch
        self._gpu = gpu

        def made(rows: int, columns: int) -> Any:  # noqa: ANN401 - a tensor
            drawn = self._torch.randn(rows, columns, dtype=self._torch.bfloat16, device="cuda")
            return drawn / rows**0.5

        kv = _KV_HEADS * _HEAD
        self._layers = [
            (
                made(_HIDDEN, _HIDDEN + 2 * kv),
                made(_HIDDEN, _HIDDEN),
                made(_HIDDEN, 2 * _INNER),
                made(_INNER, _HIDDEN),
            )
            for _ in range(_LAYERS)
        ]

    def run(self, requests: int, tokens: int) -> float:
        """Seconds of the prefill of some requests at once."""
        torch = self._torch
        states = torch.randn(requests, tokens, _HIDDEN, dtype=torch.bfloat16, device="cuda")
        self._gpu.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            for layer in self._layers:
                states = self._layer(states, *layer)
        self._gpu.synchronize()
        return time.perf_counter() - began

    def _layer(self, states: Any, into: Any, out: Any, up: Any, down: Any) -> Any:  # noqa: ANN401
        torch = self._torch
        requests, tokens, _ = states.shape
        kv = _KV_HEADS * _HEAD
        query, key, value = (states @ into).split((_HIDDEN, kv, kv), dim=-1)
        query = query.view(requests, tokens, _HEADS, _HEAD).transpose(1, 2)
        key, value = (
            each.view(requests, tokens, _KV_HEADS, _HEAD).transpose(1, 2).repeat_interleave(4, dim=1)
            for each in (key, value)
        )
        attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + attention.transpose(1, 2).reshape(requests, tokens, _HIDDEN) @ out
        gate, inner = (states @ up).chunk(2, dim=-1)
        return states + (torch.nn.functional.silu(gate) * inner) @ down
