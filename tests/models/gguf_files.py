"""GGUF files of small models, written with the ``gguf`` package and named by its own tables.

The conversions are those that llama.cpp's converter makes for these families: rotary pairs of q and
k made neighbours where its graph expects them so, Gemma's norm weights stored ready to use,
experts stacked, fused matrices sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Convert = Callable[[str, np.ndarray, Any], np.ndarray]


def unchanged(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    return tensor


def neighbouring_pairs(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """Rows of q and k with the two halves of each head interleaved."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        return tensor
    is_query = ".q_proj." in name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def whole_norms(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """Norm weights as w instead of w - 1."""
    return tensor + 1 if name.endswith("norm.weight") else tensor


def sorted_rows(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """A fused matrix of q, k and v per head as all q, then all k, then all v."""
    if "query_key_value" not in name:
        return tensor
    parts = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(tensor.shape)


def turned(name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """GPT-2's matrices the usual way round."""
    wanted = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return np.ascontiguousarray(tensor.T) if name.endswith(wanted) else tensor


@dataclass(frozen=True)
class GGUFCase:
    """Which conversion a family has, and the keys beside the usual ones.

    `fields` change the model where a GGUF file cannot say what its configuration could.
    """

    architecture: str
    convert: Convert = unchanged
    keys: tuple[tuple[str, Any], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()


def save_gguf(path: Path, model: Any, case: GGUFCase) -> None:
    """Write a transformers model in float32."""
    gguf = pytest.importorskip("gguf")
    config, arch = model.config, case.architecture
    layers = config.num_hidden_layers
    table = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_vocab_size(config.vocab_size)
    _add_numbers(writer, config)
    for key, value in case.keys:
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            writer.add_float32(f"{arch}.{key}", value)
    for name, tensor in _stacked_experts(_tensors(model, case.convert)).items():
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, f"{name} has no name in gguf's table for {arch}"
        writer.add_tensor(target, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_numbers(writer: Any, config: Any) -> None:
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "rms_norm_eps", None):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name in ("layer_norm_eps", "layer_norm_epsilon"):
        if getattr(config, name, None):
            writer.add_layer_norm_eps(getattr(config, name))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])


def _tensors(model: Any, convert: Convert) -> dict[str, np.ndarray]:
    """Tensors by their names in a folder, a tied head left out."""
    own = {
        n.replace("embed_out.weight", "lm_head.weight"): t for n, t in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        own.pop("lm_head.weight", None)
    return {
        name: np.ascontiguousarray(convert(name, tensor.float().numpy(), model.config))
        for name, tensor in own.items()
    }


def _stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers' gate and up of all experts in one tensor, as two."""
    split: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            gate, up = np.split(tensor, 2, axis=1)
            split[base + "gate_proj.weight"] = np.ascontiguousarray(gate)
            split[base + "up_proj.weight"] = np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            split[name + ".weight"] = tensor
        else:
            split[name] = tensor
    return split
