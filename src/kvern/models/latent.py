"""Multi-head latent attention, absorbed: the cache holds one vector per token, never heads.

With k = W_uk c and v = W_uv c for the compressed c of a token, a head's score q·k is (W_uk^T q)·c
and its output is W_uv times the weighted sum of c. So queries go down into the latent space and
results come up from it, per head, and attention itself is that of one shared key-value head whose
values are its keys' first ``latent_dim`` elements. It is computed so for one query and for a
thousand.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendParams, Backend, Weight
from kvern.models.attention import LayerStep
from kvern.models.config import LatentConfig, LayerConfig
from kvern.models.rope import RopeTable

F32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class LatentWeights:
    """Projections; per head `k_up` is ``[latent_dim, nope_dim]``, `v_up` ``[value_dim, latent_dim]``.

    These two are the backend's `group_heads`.

    `q` projects the layer's input, or the normed `q_down` of it where there is one.
    """

    q_down: Weight | None
    q_down_bias: F32 | None
    q_down_norm: F32 | None
    q: Weight
    kv_down: Weight
    kv_down_bias: F32 | None
    kv_down_norm: F32
    k_up: Any
    v_up: Any
    output: Weight
    output_bias: F32 | None


class LatentAttention:
    """One layer's latent attention with its weights."""

    def __init__(
        self, layer: LayerConfig, weights: LatentWeights, params: AttendParams, rope: RopeTable
    ) -> None:
        """Args: as `HeadsAttention`."""
        assert layer.latent is not None
        self.layer = layer
        self.latent: LatentConfig = layer.latent
        self.weights = weights
        self.params = params
        self.rope = rope

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`."""
        layer, latent, views = self.layer, self.latent, step.views
        num_tokens, heads, entry_dim = len(x), layer.num_heads, latent.latent_dim + latent.rope_dim
        self._append(backend, x, step)
        query = self._query(backend, x, step)
        wide = views.extra["latent_attended"].reshape(num_tokens, heads, entry_dim)
        keys = step.cache.keys
        assert keys is not None
        products = backend.attend(query, keys, keys, step.batch, self.params, wide)
        latents = wide[:, :, : latent.latent_dim]
        backend.matmul_heads(latents, self.weights.v_up, views.attended)
        backend.matmul(views.attended_rows, self.weights.output, out)
        if self.weights.output_bias is not None:
            backend.add_bias(out, self.weights.output_bias)
        return products

    def _append(self, backend: Backend, x: F32, step: LayerStep) -> None:
        """Compress each token, norm the latent, turn the rotary key, store both as one vector."""
        weights, latent, entry = self.weights, self.latent, step.views.extra["kv_down"]
        backend.matmul(x, weights.kv_down, entry)
        if weights.kv_down_bias is not None:
            backend.add_bias(entry, weights.kv_down_bias)
        compressed = entry[:, : latent.latent_dim]
        backend.norm(compressed, weights.kv_down_norm, None, latent.norm_eps, False, compressed)
        self._rotate(backend, entry[:, None, latent.latent_dim :], step)
        assert step.cache.keys is not None
        backend.append(entry[:, None, :], step.cache.keys, step.batch)

    def _query(self, backend: Backend, x: F32, step: LayerStep) -> F32:
        """Queries in the latent space, ``[T, heads, latent_dim + rope_dim]``."""
        weights, latent, extra, num_tokens = self.weights, self.latent, step.views.extra, len(x)
        if weights.q_down is not None:
            assert weights.q_down_norm is not None
            backend.matmul(x, weights.q_down, extra["q_down"])
            if weights.q_down_bias is not None:
                backend.add_bias(extra["q_down"], weights.q_down_bias)
            x = extra["q_down_normed"]
            backend.rms_norm(extra["q_down"], weights.q_down_norm, latent.norm_eps, x)
        backend.matmul(x, weights.q, extra["q_heads"])
        heads = extra["q_heads"].reshape(num_tokens, self.layer.num_heads, -1)
        query = extra["latent_query"].reshape(num_tokens, self.layer.num_heads, -1)
        backend.matmul_heads(
            heads[:, :, : latent.nope_dim], weights.k_up, query[:, :, : latent.latent_dim]
        )
        turned = query[:, :, latent.latent_dim :]
        backend.copy(heads[:, :, latent.nope_dim :], turned)
        self._rotate(backend, turned, step)
        return query

    def _rotate(self, backend: Backend, x: F32, step: LayerStep) -> None:
        rope = self.layer.rope
        assert rope is not None
        rows, cos, sin = self.rope.of_step(step.batch, step.num_positions)
        backend.rotary(x, rows, cos, sin, rope.interleaved)
