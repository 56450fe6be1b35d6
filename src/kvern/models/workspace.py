"""The decoder's activations: allocated once for the largest step, handed out as views.

A step of T tokens uses the first T rows of every buffer. Buffers are C-contiguous, so a view of T
rows is too, and the same T always gets the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch
from kvern.models.config import DecoderConfig, LayerConfig, MambaConfig, ShortConvConfig

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

HIDDEN_BUFFERS = ("hidden", "normed", "delta", "second_delta")


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """Views for one attention and feed-forward geometry; several layers share them.

    Attributes:
        qkv: ``[T, qkv_width]``, what the stacked projection writes.
        q, k, v: views of it, ``[T, heads, dim]``, token stride that of `qkv`.
        attended: ``[T, heads, value_dim]``, and `attended_rows` the same as ``[T, heads *
            value_dim]``.
        gate_up: ``[T, 2 * intermediate]``.
        activated: ``[T, intermediate]``.
        extra: buffers ``[T, width]`` that only some geometries use; see `extra_widths`.
    """

    qkv: F32
    q: F32
    k: F32
    v: F32
    attended: F32
    attended_rows: F32
    gate_up: F32
    activated: F32
    extra: Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """All views for steps of T tokens; all but `layers` and `extra` are ``[T, hidden_size]``."""

    hidden: F32
    normed: F32
    delta: F32
    second_delta: F32
    layers: Sequence[LayerBuffers]
    extra: Mapping[str, F32]


class Program(Protocol):
    """A step's operations recorded by a backend, on the addresses of one workspace and pool."""

    max_positions: int

    def run(self, token_ids: I32, batches: Sequence[AttendBatch]) -> int:
        """Repeat them for other tokens; returns the number of query-key products per head."""
        ...


@dataclass(slots=True)
class Recorded:
    """What `kvern.models.program` keeps for a workspace: a program, or that none can be had.

    Attributes:
        verified: for which steps it has been compared with its operations one by one: True for those
            of a single row, False for those of several.
    """

    program: Program | None = None
    is_refused: bool = False
    verified: set[bool] = field(default_factory=set)


class Workspace:
    """Every activation buffer of one decoder, and the program recorded on them, if any."""

    MAX_REMEMBERED = 64

    def __init__(self, config: DecoderConfig, max_tokens: int) -> None:
        """Allocate for steps of up to ``max_tokens`` tokens."""
        self.max_tokens = max_tokens
        self.recorded = Recorded()
        self._layers = config.layers
        self._hidden_size = config.hidden_size
        self._extra = _per_layer_widths(config)
        self._flat = {
            name: np.empty(max_tokens * width, np.float32) for name, width in self._widths().items()
        }
        self._views: dict[int, StepBuffers] = {}

    def _widths(self) -> dict[str, int]:
        layers = self._layers
        widths = dict.fromkeys(HIDDEN_BUFFERS, self._hidden_size)
        widths |= {
            "qkv": max(qkv_width(layer) for layer in layers),
            "attended": max(layer.num_heads * layer.value_dim for layer in layers),
            "gate_up": max(2 * layer.intermediate_size for layer in layers),
            "activated": max(layer.intermediate_size for layer in layers),
        }
        widths |= self._extra
        for layer in set(layers):
            for name, width in extra_widths(layer, self._hidden_size).items():
                widths[name] = max(widths.get(name, 0), width)
        return widths

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for buffer in self._flat.values())

    def rows(self, num_tokens: int) -> StepBuffers:
        """The views for a step of ``num_tokens`` tokens; the same objects every time."""
        views = self._views.get(num_tokens)
        if views is None:
            if len(self._views) >= self.MAX_REMEMBERED:
                del self._views[next(iter(self._views))]
            views = self._views[num_tokens] = self._make(num_tokens)
        return views

    def _make(self, num_tokens: int) -> StepBuffers:
        made: dict[LayerConfig, LayerBuffers] = {}
        for layer in set(self._layers):
            made[layer] = self._layer_views(num_tokens, layer)
        hidden = {name: self._view(name, num_tokens, self._hidden_size) for name in HIDDEN_BUFFERS}
        extra = {name: self._view(name, num_tokens, width) for name, width in self._extra.items()}
        return StepBuffers(**hidden, layers=[made[layer] for layer in self._layers], extra=extra)

    def _view(self, name: str, num_tokens: int, width: int) -> F32:
        return self._flat[name][: num_tokens * width].reshape(num_tokens, width)

    def _layer_views(self, num_tokens: int, layer: LayerConfig) -> LayerBuffers:
        qkv = self._view("qkv", num_tokens, qkv_width(layer))
        q_end = layer.num_heads * layer.key_dim
        k_end = q_end + layer.num_kv_heads * layer.key_dim
        v_end = k_end + layer.num_kv_heads * layer.value_dim
        v = qkv[:, k_end:v_end]
        if layer.keys_are_values:
            v = qkv[:, q_end:k_end]
        if layer.latent is not None:
            q_end = k_end = v_end = 0
        widths = extra_widths(layer, self._hidden_size)
        extra = {name: self._view(name, num_tokens, width) for name, width in widths.items()}
        if layer.has_gate:
            extra["gate"] = qkv[:, v_end:]
        attended_rows = self._view("attended", num_tokens, layer.num_heads * layer.value_dim)
        return LayerBuffers(
            qkv=qkv,
            q=qkv[:, :q_end].reshape(num_tokens, -1, layer.key_dim),
            k=qkv[:, q_end:k_end].reshape(num_tokens, -1, layer.key_dim),
            v=v.reshape(num_tokens, -1, layer.value_dim),
            attended=attended_rows.reshape(num_tokens, layer.num_heads, layer.value_dim),
            attended_rows=attended_rows,
            gate_up=self._view("gate_up", num_tokens, 2 * layer.intermediate_size),
            activated=self._view("activated", num_tokens, layer.intermediate_size),
            extra=extra,
        )


def _per_layer_widths(config: DecoderConfig) -> dict[str, int]:
    """Columns of the buffers for an embedding per layer."""
    size, hidden = config.per_layer_size, config.hidden_size
    if not size:
        return {}
    every = size * len(config.layers)
    widths = {"per_layer_own": every, "per_layer": every, "per_layer_gate": size}
    return widths | {"per_layer_out": hidden, "per_layer_normed": hidden}


def qkv_width(layer: LayerConfig) -> int:
    """Columns of the stacked q, k and v projection, and the gate's if any; 0 for a latent."""
    if layer.latent is not None:
        return 0
    q = layer.num_heads * layer.key_dim
    if layer.share_with is not None:
        return q
    gate = layer.num_heads * layer.value_dim if layer.has_gate else 0
    values = 0 if layer.keys_are_values else layer.value_dim
    return q + layer.num_kv_heads * (layer.key_dim + values) + gate


def extra_widths(layer: LayerConfig, hidden_size: int = 0) -> dict[str, int]:
    """Columns of the buffers that a geometry needs beside the common ones."""
    widths: dict[str, int] = {}
    if layer.has_value_norm:
        values = layer.num_kv_heads * layer.value_dim
        widths["v_normed"] = values
    latent = layer.latent
    if latent is not None:
        entry = latent.latent_dim + latent.rope_dim
        widths |= {
            "kv_down": entry,
            "q_heads": layer.num_heads * (latent.nope_dim + latent.rope_dim),
            "latent_query": layer.num_heads * entry,
            "latent_attended": layer.num_heads * entry,
        }
        if latent.query_rank is not None:
            widths |= {"q_down": latent.query_rank, "q_down_normed": latent.query_rank}
    return widths | _state_widths(layer, hidden_size) | _experts_widths(layer, hidden_size)


def _state_widths(layer: LayerConfig, hidden_size: int) -> dict[str, int]:
    state = layer.state
    if state is None:
        return {}
    if isinstance(state, ShortConvConfig):
        return {
            "state_inputs": 3 * hidden_size,
            "state_conv": hidden_size,
            "state_mixed": hidden_size,
        }
    channels = state.num_channels
    if isinstance(state, MambaConfig):
        width = state.num_heads * state.head_dim
        inputs = width + channels + state.num_heads
        return {"state_inputs": inputs, "state_conv": channels, "state_mixed": width}
    width, gates = state.num_value_heads * state.value_dim, 2 * state.num_value_heads
    return {
        "state_inputs": channels + width,
        "state_gates": gates,
        "state_conv": channels,
        "state_mixed": width,
    }


def _experts_widths(layer: LayerConfig, hidden_size: int) -> dict[str, int]:
    experts = layer.experts
    if experts is None:
        return {}
    widths = {
        "router_logits": experts.num_experts,
        "expert_ids": experts.num_chosen,
        "expert_weights": experts.num_chosen,
    }
    if experts.shared_size:
        wide = experts.shared_size * (2 if experts.is_gated else 1)
        widths |= {"shared_wide": wide, "shared_inner": experts.shared_size, "shared": hidden_size}
    if experts.has_shared_gate:
        widths["shared_gate"] = 1
    if layer.has_both:
        widths |= dict.fromkeys(("both", "routed", "routed_normed", "routed_input"), hidden_size)
    return widths
