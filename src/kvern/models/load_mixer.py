"""From a layer's description to its token mixer with weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendParams
from kvern.models.attention import AttentionWeights, HeadsAttention
from kvern.models.config import LayerConfig
from kvern.models.latent import LatentAttention, LatentWeights
from kvern.models.load_states import state_mixer
from kvern.models.loader import Loader
from kvern.models.names import TensorNames
from kvern.models.recurrent import DeltaNet, Mamba, ShortConv
from kvern.models.weights import take_rows, transposed

I64 = npt.NDArray[np.int64]

Mixer = HeadsAttention | LatentAttention | DeltaNet | Mamba | ShortConv


def mixer_of(loader: Loader, index: int) -> Mixer:
    """One layer's token mixer."""
    if loader.config.layers[index].state is not None:
        return state_mixer(loader, index)
    layer, names = loader.config.layers[index], loader.names
    params = AttendParams(
        scale=layer.scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=layer.softcap,
        sink_logits=loader.source.vector(loader.name(names.sinks, i=index), layer.num_heads)
        if layer.has_sinks
        else None,
    )
    rope = None if layer.rope is None else loader.rope_table(layer.rope)
    if layer.latent is not None:
        assert rope is not None
        return LatentAttention(layer, _latent_weights(loader, index), params, rope)
    return HeadsAttention(layer, _attention_weights(loader, index), params, rope)


def _attention_weights(loader: Loader, index: int) -> AttentionWeights:
    config, names, layer = loader.config, loader.names, loader.config.layers[index]
    hidden = config.hidden_size
    q_rows = layer.num_heads * (layer.key_dim + (layer.value_dim if layer.has_gate else 0))
    k_rows, v_rows = layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim
    parts = _projections(names, layer, q_rows, k_rows, v_rows)
    tensors = [loader.matrix(name, rows, hidden, i=index) for name, rows in parts]
    bias = loader.bias(config.qkv_bias, *parts, i=index)
    if loader.family.fused_rows is not None and not loader.source.is_gguf:
        order = loader.family.fused_rows(layer)
        tensors = [take_rows(tensors[0], order)]
        bias = None if bias is None else bias[order]
    if layer.has_gate:
        q_order, gate_order = _queries_and_gates(layer)
        tensors = [take_rows(tensors[0], q_order), *tensors[1:], take_rows(tensors[0], gate_order)]
        if bias is not None:
            bias = np.concatenate([bias[q_order], bias[q_rows:], bias[gate_order]])
    q_norm = k_norm = None
    if layer.qk_norm == "unit":
        q_norm = k_norm = np.ones(layer.key_dim, np.float32)
    elif layer.qk_norm is not None:
        whole = layer.qk_norm == "all"
        q_size = layer.key_dim * (layer.num_heads if whole else 1)
        k_size = layer.key_dim * (layer.num_kv_heads if whole else 1)
        q_norm = loader.norm_weight(names.q_norm, q_size, i=index)
        if layer.share_with is None:
            k_norm = loader.norm_weight(names.k_norm, k_size, i=index)
    return AttentionWeights(
        qkv=loader.prepare(*tensors),
        qkv_bias=bias,
        output=loader.prepare(
            loader.matrix(names.output, hidden, layer.num_heads * layer.value_dim, i=index)
        ),
        output_bias=loader.bias(config.output_bias, (names.output, hidden), i=index),
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=np.ones(layer.value_dim, np.float32) if layer.has_value_norm else None,
        norm_eps=config.norm_eps,
    )


def _projections(
    names: TensorNames, layer: LayerConfig, q_rows: int, k_rows: int, v_rows: int
) -> list[tuple[str, int]]:
    """Names and rows of the matrices that yield q, k and v, as far as the layer has them."""
    if names.qkv is not None:
        return [(names.qkv, q_rows + k_rows + v_rows)]
    if layer.share_with is not None:
        return [(names.q, q_rows)]
    parts = [(names.q, q_rows), (names.k, k_rows), (names.v, v_rows)]
    return parts[:2] if layer.keys_are_values else parts


def _latent_weights(loader: Loader, index: int) -> LatentWeights:
    config, names, layer = loader.config, loader.names, loader.config.layers[index]
    latent, hidden = layer.latent, config.hidden_size
    assert latent is not None
    q_rows = layer.num_heads * (latent.nope_dim + latent.rope_dim)
    entry = latent.latent_dim + latent.rope_dim
    rank = latent.query_rank
    q_down = q_down_norm = q_down_bias = None
    if rank is None:
        q = loader.matrix(names.q, q_rows, hidden, i=index)
    else:
        q = loader.matrix(names.q_up, q_rows, rank, i=index)
        q_down = loader.prepare(loader.matrix(names.q_down, rank, hidden, i=index))
        q_down_norm = loader.source.vector(loader.name(names.q_down_norm, i=index), rank)
        q_down_bias = loader.bias(config.qkv_bias, (names.q_down, rank), i=index)
    k_up, v_up = _absorbed(loader, index)
    return LatentWeights(
        q_down=q_down,
        q_down_bias=q_down_bias,
        q_down_norm=q_down_norm,
        q=loader.prepare(q),
        kv_down=loader.prepare(loader.matrix(names.kv_down, entry, hidden, i=index)),
        kv_down_bias=loader.bias(config.qkv_bias, (names.kv_down, entry), i=index),
        kv_down_norm=loader.source.vector(
            loader.name(names.kv_down_norm, i=index), latent.latent_dim
        ),
        k_up=k_up,
        v_up=v_up,
        output=loader.prepare(
            loader.matrix(names.output, hidden, layer.num_heads * layer.value_dim, i=index)
        ),
        output_bias=loader.bias(config.output_bias, (names.output, hidden), i=index),
    )


def _absorbed(loader: Loader, index: int) -> tuple[Any, Any]:
    """Per head: the key expansion transposed, and the value expansion."""
    names, layer = loader.names, loader.config.layers[index]
    latent, heads, value_dim = layer.latent, layer.num_heads, layer.value_dim
    assert latent is not None
    k_up = loader.name(names.k_up, i=index)
    if names.k_up and k_up in loader.source:
        v_up = loader.name(names.v_up, i=index)
        k_parts = loader.source.matrices(k_up, heads, latent.latent_dim, latent.nope_dim)
        v_parts = loader.source.matrices(v_up, heads, value_dim, latent.latent_dim)
    else:
        width = latent.nope_dim + value_dim
        both = loader.matrix(names.kv_up, heads * width, latent.latent_dim, i=index)
        rows = np.arange(heads * width).reshape(heads, width)
        k_parts = [transposed(take_rows(both, part[: latent.nope_dim])) for part in rows]
        v_parts = [take_rows(both, part[latent.nope_dim :]) for part in rows]
    group = loader.backend.group_heads
    return group([*map(loader.prepare, k_parts)]), group([*map(loader.prepare, v_parts)])


def _queries_and_gates(layer: LayerConfig) -> tuple[I64, I64]:
    """Rows of a query projection that yields, per head, a query and then a gate."""
    rows = np.arange(2 * layer.num_heads * layer.key_dim).reshape(layer.num_heads, 2, layer.key_dim)
    return rows[:, 0].ravel(), rows[:, 1].ravel()
