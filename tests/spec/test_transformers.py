"""Every family against transformers: a small model's parameters, and the cache it really fills.

For each `model_type` a model of random weights is built from the library's own configuration class,
one forward pass of 20 tokens is made, and the tensors in its cache are compared with the caches that
the configuration alone was described to need.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from kvern.spec import Chunk, Heads, Index, Latent, State, Window
from kvern.spec.configs import load_model_spec

pytestmark = pytest.mark.full

NUM_TOKENS = 20

SMALL: dict[str, Any] = {
    # sizes
    "vocab_size": 128, "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "intermediate_size_mlp": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4,
    "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    # attention
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "window_size": 8,
    "attention_chunk_size": 8, "attention_types": [[["global", "local"], 2]],
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    # latent attention and indexers
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "indexer_head_dim": 16, "indexer_kv_heads": 1, "indexer_n_heads": 2, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    # states
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "linear_num_heads": 4,
    "linear_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 6,
    "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4, "state_size": 6,
}  # fmt: skip

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "laurel_rank": 4},
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "jamba": {"num_hidden_layers": 8},
    "kimi_linear": {"layer_types": ["full_attention"] + ["linear_attention"] * 3},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"],
             "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "mamba2": {"num_heads": 8, "expand": 2},
    "nemotron_h": {"hybrid_override_pattern": "M-M*E"},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}  # fmt: skip

COUNTED = [
    "arcee",
    "bloom",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "exaone",
    "exaone4",
    "falcon",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm3",
    "jamba",
    "lfm2",
    "llama",
    "llama4_text",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
]
DESCRIBED = [
    "apertus",
    "bamba",
    "ernie4_5_moe",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "kimi_linear",
    "laguna",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "mimo_v2_flash",
    "nemotron_h",
    "persimmon",
    "phimoe",
    "qwen4_exp_text",
    "stablelm",
]


def small_config(transformers: Any, family: str) -> Any:
    kind = transformers.CONFIG_MAPPING[family]
    fields = set(kind.__dataclass_fields__) | set(getattr(kind, "attribute_map", {}))
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in values:  # these families derive the head dim from its parts
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    return kind(**values | OWN.get(family, {}))


def tensors_of(layer: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of what one layer of a transformers cache holds, the batch dimension left out."""
    found: dict[str, Any] = {n: getattr(layer, n, None) for n in ("keys", "values", "indexer_keys")}
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or {}
        found[name] = states.get(0) if isinstance(states, dict) else states[0]
    return {name: tuple(t.shape[1:]) for name, t in found.items() if hasattr(t, "shape")}


def check_cache(cache: Any, tensors: dict[str, tuple[int, ...]], global_windows: bool) -> None:
    content, reach = cache.content, cache.reach
    num_kept = NUM_TOKENS
    if isinstance(reach, Window | Chunk) and not global_windows:
        num_kept = reach.size - 1  # what the next query needs beside itself
    match content:
        case Heads(num_kv_heads, key_dim, value_dim):
            assert tensors["keys"] == (num_kv_heads, num_kept, key_dim)
            assert tensors["values"] == (num_kv_heads, num_kept, value_dim)
        case Latent(latent_dim, rope_dim):
            assert tensors["keys"] == (1, num_kept, latent_dim)
            assert tensors["values"] == (1, num_kept, rope_dim)
        case Index(dim):
            assert tensors.get("indexer_keys", (num_kept, dim)) == (num_kept, dim)
        case State(parts):
            for part in parts:
                if part.name == "conv":  # the library keeps the current column, too
                    channels, columns = tensors["conv_states"]
                    assert channels == part.shape[0]
                    assert columns in (part.shape[1], part.shape[1] + 1)
                else:
                    wanted = sorted(n for n in part.shape if n > 1)
                    assert sorted(n for n in tensors["recurrent_states"] if n > 1) == wanted


@pytest.mark.parametrize("family", COUNTED + DESCRIBED)
def test_small_model(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = small_config(transformers, family)
    values = json.loads(config.to_json_string(use_diff=False)) | {"model_type": family}
    spec = load_model_spec(values, family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            output = model(torch.arange(NUM_TOKENS)[None], use_cache=True)
    if family in COUNTED:
        biases = [b for name, b in model.named_buffers() if "correction_bias" in name]
        total = sum(tensor.numel() for tensor in [*model.parameters(), *biases])
        assert spec.parameters is not None, spec.missing_fields
        assert spec.parameters.total == total
    past = output.get("past_key_values") or output.get("cache_params") or output["cache"]
    for layer, cached in zip(spec.layers, past.layers, strict=True):
        for cache in layer.caches:
            if cache.share_with is None:
                check_cache(cache, tensors_of(cached), global_windows=family == "gpt_neo")
