"""What a field that a `config.json` leaves out means, where that is not simply "none".

One table for the cache's description and for the decoders, so that both read a folder the same way.
A field that is stated, be it as null, is never changed. The values are those of the configuration
classes of transformers 5.24, with which the tests compare every one. Widths without which a model
has no shape (the hidden size, the number of layers and heads, the sizes of experts and states) are
not here: a configuration that lacks one is refused by the field's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GEMMA3 = "gemma3 gemma3_text"
_GEMMA3N = "gemma3n gemma3n_text"
_GEMMA4 = "gemma4 gemma4_text"
_GEMMA4_UNIFIED = "gemma4_unified gemma4_unified_text"
_LLAMA4 = "llama4 llama4_text"
_MINIMAX_M3 = "minimax_m3_vl minimax_m3_vl_text"
_QWEN_VL = "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text"
_QWEN3_VL = "qwen3_vl qwen3_vl_text"
_QWEN3_VL_MOE = "qwen3_vl_moe qwen3_vl_moe_text"
_QWEN3_5 = "qwen3_5 qwen3_5_text"
_QWEN3_5_MOE = "qwen3_5_moe qwen3_5_moe_text"
_QWEN4 = "qwen4_exp qwen4_exp_text"

_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_MISTRAL_YARN = {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}

_BY_FIELD: Mapping[str, tuple[tuple[object, str], ...]] = {
    "sliding_window": (
        (
            4096,
            f"mistral ministral cohere2 exaone4 gemma2 {_GEMMA3} olmo3 qwen2 {_QWEN_VL} "
            "qwen2_moe qwen3 qwen3_moe vaultgemma",
        ),
        (512, f"{_GEMMA3N} {_GEMMA4}"),
        (1024, _GEMMA4_UNIFIED),
        (128, "deepseek_v4 gpt_oss"),
        (129, "mimo_v2_flash"),
    ),
    "max_window_layers": ((28, "qwen2 qwen2_moe qwen3"), (80, _QWEN_VL)),
    "attention_chunk_size": ((8192, _LLAMA4),),
    "window_size": ((256, "gpt_neo"),),
    "attn_config": (({"kv_n_heads": 1}, "dbrx"),),
    "v_head_dim": ((128, "mimo_v2_flash"),),
    "model_max_length": ((1_048_576, "kimi_linear"),),
    "max_seq_len": ((2048, "mpt dbrx"),),
    "conv_L_cache": ((3, "lfm2 lfm2_moe"),),
    "attn_layer_period": ((8, "jamba"),),
    "attn_layer_offset": ((4, "jamba"),),
    "num_kv_shared_layers": ((15, _GEMMA3N),),
    "num_nextn_predict_layers": ((1, "deepseek_v3 deepseek_v4 glm4_moe bailing_hybrid"),),
    "head_dim": (
        (
            128,
            f"ernie4_5 glm glm4 helium internlm3 laguna {_LLAMA4} minimax_m2 {_MINIMAX_M3} "
            f"ministral3 nemotron_h qwen3 {_QWEN3_VL} seed_oss",
        ),
        (
            256,
            f"gemma gemma2 {_GEMMA3} {_GEMMA3N} {_GEMMA4} {_GEMMA4_UNIFIED} {_QWEN3_5} "
            f"{_QWEN3_5_MOE} qwen3_next vaultgemma",
        ),
        (64, "gpt_oss"),
        (192, "mimo_v2_flash"),
        (512, "deepseek_v4"),
    ),
    "num_key_value_heads": (
        (1, "deepseek_v4"),
        (
            2,
            f"ernie4_5 {_GEMMA3N} glm glm4 internlm3 {_QWEN3_5_MOE} qwen3_next {_QWEN4} starcoder2",
        ),
        (
            8,
            f"exaone glm4_moe gpt_oss jamba laguna lfm2 lfm2_moe {_LLAMA4} minimax minimax_m2 ministral "
            f"ministral3 mistral mixtral phimoe bamba falcon_h1 nemotron_h {_QWEN_VL} seed_oss",
        ),
        (16, "gemma qwen2_moe"),
        (20, "helium"),
        (32, f"dots1 exaone4 qwen2 qwen3 {_QWEN3_VL} stablelm"),
    ),
    "num_experts_per_tok": (
        (1, _LLAMA4),
        (2, "granitemoe granitemoehybrid granitemoeshared jamba minimax mixtral nemotron_h phimoe"),
        (4, f"gpt_oss qwen2_moe {_QWEN3_VL_MOE}"),
        (5, "flex_olmo"),
        (6, "deepseek_v4"),
        (
            8,
            "bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe glm_moe_dsa laguna mimo_v2_flash "
            f"minimax_m2 olmoe {_QWEN3_5_MOE} qwen3_moe",
        ),
        (10, "qwen3_next"),
    ),
    "num_experts_per_token": ((8, "kimi_linear"),),
    "moe_topk": ((1, "hunyuan_v1_moe"),),
    "n_shared_experts": (
        (1, "deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe glm4_moe_lite glm_moe_dsa mistral4"),
        (2, "deepseek_v2"),
    ),
    "first_k_dense_replace": ((1, "glm4_moe"), (3, "deepseek_v3")),
    "n_groups": ((8, "mamba2 nemotron_h"),),
    "n_group": ((8, "deepseek_v3"),),
    "topk_group": ((4, "deepseek_v3"),),
    "routed_scaling_factor": ((2.5, "deepseek_v3"),),
    "q_lora_rank": ((768, "minicpm3"), (1536, "deepseek_v2 deepseek_v3")),
    "query_pre_attn_scalar": ((256, f"gemma2 {_GEMMA3}"),),
    "attention_bias": ((True, "glm glm4 gpt_neox"),),
    "use_bias": ((True, "starcoder2"),),
    "enable_bias": ((True, "opt"),),
    "tie_word_embeddings": ((True, "ernie4_5_moe mamba vaultgemma"),),
    "rms_norm_eps": (
        (
            1e-5,
            f"apertus arcee ernie4_5 ernie4_5_moe exaone exaone4 glm4_moe glm4_moe_lite glm_moe_dsa "
            f"gpt_oss hunyuan_v1_dense hunyuan_v1_moe internlm3 {_LLAMA4} mimo_v2_flash minicpm3 "
            f"ministral3 mixtral mllama_text_model olmo2 olmo3 olmoe phi3 phimoe {_QWEN_VL}",
        ),
        (1.5625e-07, "glm glm4"),
        (1e-8, "helium"),
    ),
    "rope_theta": (
        (100_000.0, "helium"),
        (150_000.0, "gpt_oss"),
        (
            500_000.0,
            f"cohere ernie4_5 ernie4_5_moe exaone flex_olmo {_LLAMA4} mllama_text_model olmo3 "
            f"{_QWEN3_VL} {_QWEN3_VL_MOE}",
        ),
        (1_000_000.0, f"lfm2 lfm2_moe mixtral phimoe {_QWEN_VL}"),
        (2_000_000.0, "smollm3"),
        (5_000_000.0, f"minimax_m2 {_MINIMAX_M3}"),
        (12_000_000.0, "apertus"),
    ),
    "partial_rotary_factor": ((0.5, "glm4_moe"),),
    "rope_parameters": (
        (
            {**_YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            "gpt_oss",
        ),
        (
            {**_MISTRAL_YARN, "factor": 16.0, "original_max_position_embeddings": 16_384}
            | {"rope_theta": 1_000_000.0},
            "ministral3",
        ),
        (
            {**_MISTRAL_YARN, "factor": 128.0, "original_max_position_embeddings": 8192}
            | {"partial_rotary_factor": 0.5},
            "mistral4",
        ),
    ),
    "original_max_position_embeddings": ((4096, "phi3"),),
    "max_position_embeddings": (
        (
            2048,
            "deepseek_v2 dots1 exaone4 falcon gpt_neox granite granitemoe granitemoehybrid granitemoeshared "
            "hunyuan_v1_dense hunyuan_v1_moe llama olmo olmo2 olmo3 phi",
        ),
        (
            4096,
            "arcee deepseek_v3 exaone flex_olmo helium nemotron nemotron_h olmoe phi3 stablelm starcoder2",
        ),
        (8192, "cohere cohere2 falcon_h1 gemma gemma2 vaultgemma"),
        (16_384, "persimmon"),
        (
            32_768,
            f"{_GEMMA3N} internlm3 minicpm3 qwen2 {_QWEN_VL} qwen2_moe qwen3 {_QWEN3_5} "
            f"{_QWEN3_5_MOE} qwen3_moe qwen3_next {_QWEN4} smollm3",
        ),
        (65_536, "apertus"),
        (128_000, f"lfm2 lfm2_moe {_QWEN3_VL} {_QWEN3_VL_MOE}"),
        (
            131_072,
            f"ernie4_5 ernie4_5_moe {_GEMMA3} {_GEMMA4} glm glm4 glm4_moe gpt_oss laguna {_LLAMA4} "
            "mimo_v2_flash minimax ministral mistral mixtral phimoe",
        ),
        (163_840, "deepseek_v32"),
        (196_608, "minimax_m2"),
        (202_752, "glm4_moe_lite glm_moe_dsa"),
        (262_144, f"bailing_hybrid bamba {_GEMMA4_UNIFIED} jamba ministral3"),
        (524_288, f"{_MINIMAX_M3} seed_oss"),
        (1_048_576, "deepseek_v4 mistral4"),
    ),
}


def _by_type() -> Mapping[str, Mapping[str, object]]:
    found: dict[str, dict[str, object]] = defaultdict(dict)
    for field, meanings in _BY_FIELD.items():
        for value, model_types in meanings:
            for model_type in model_types.split():
                found[model_type][field] = value
    return MappingProxyType({name: MappingProxyType(fields) for name, fields in found.items()})


ABSENT_FIELDS: Mapping[str, Mapping[str, object]] = _by_type()
"""By `model_type`: fields and what their absence means."""

NESTED_FIELDS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama": {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        "mistral": {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        "gemma3_text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
        },
    }
)
"""Widths that the text part of a model with pictures leaves out: it states only what differs."""

SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rope_parameters": ("rope_scaling",),
        "sliding_window": ("window_size", "sliding_window_size"),
        "num_key_value_heads": ("num_kv_heads",),
        "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_topk"),
        "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length"),
        "attention_chunk_size": (),
        "partial_rotary_factor": ("rotary_dim",),
    }
)
"""Other names of a field: what one of them states is not absent."""

SIZES = frozenset(
    {
        "head_dim",
        "num_key_value_heads",
        "num_experts_per_tok",
        "n_shared_experts",
        "first_k_dense_replace",
        "q_lora_rank",
        "conv_L_cache",
        "n_groups",
        "v_head_dim",
    }
)
"""Fields of the table that change the number of weights, which is never counted by a default."""


def absent_fields(values: Mapping[str, Any], is_nested: bool = False) -> dict[str, object]:
    """What a configuration leaves out and its model type implies.

    Args:
        values: the text model's configuration.
        is_nested: it lies inside another model's.
    """
    model_type = str(values.get("model_type"))
    implied = dict(ABSENT_FIELDS.get(model_type, {}))
    if is_nested:
        implied |= NESTED_FIELDS.get(model_type, {})
    return {name: value for name, value in implied.items() if not _is_stated(values, name)}


def unknown_sizes(values: Mapping[str, Any], is_nested: bool = False) -> frozenset[str]:
    """The fields that change the number of weights and that only a default gives a value."""
    known = NESTED_FIELDS.get(str(values.get("model_type")), {}) if is_nested else {}
    return frozenset(SIZES & absent_fields(values, is_nested).keys() - known.keys())


def with_absent_fields(values: Mapping[str, Any], is_nested: bool = False) -> Mapping[str, Any]:
    """The fields of a configuration and those that its model type implies."""
    implied = absent_fields(values, is_nested)
    if "rope_parameters" in implied:  # both spellings may stand there as null
        values = {name: value for name, value in values.items() if name != "rope_parameters"}
    return {**implied, **values} if implied else values


def _is_stated(values: Mapping[str, Any], name: str) -> bool:
    spellings = (name, *SPELLINGS.get(name, ()))
    if name == "rope_parameters":
        return any(values.get(spelling) for spelling in spellings)
    return any(spelling in values for spelling in spellings)
