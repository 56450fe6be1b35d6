"""A GGUF file's metadata in the words of `config.json`, so that one description serves both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvern.spec.configs.absent import ABSENT_FIELDS
from kvern.spec.configs.schedule import CONV, FULL, LINEAR, SLIDING
from kvern.spec.gguf import GGUFHeader

FAMILY_OF = MappingProxyType(
    {
        "llama": "llama",
        "mistral3": "mistral",
        "mistral4": "mistral4",
        "qwen2": "qwen2",
        "qwen2vl": "qwen2",
        "qwen2moe": "qwen2_moe",
        "qwen3": "qwen3",
        "qwen3vl": "qwen3",
        "qwen3moe": "qwen3_moe",
        "qwen3vlmoe": "qwen3_moe",
        "qwen3next": "qwen3_next",
        "qwen35": "qwen3_5",
        "qwen35moe": "qwen3_5_moe",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "gemma-embedding": "embedding_gemma2",
        "phi2": "phi",
        "phi3": "phi3",
        "starcoder": "gpt_bigcode",
        "starcoder2": "starcoder2",
        "command-r": "cohere",
        "cohere2": "cohere2",
        "olmo": "olmo",
        "olmo2": "olmo2",
        "olmoe": "olmoe",
        "deepseek2": "deepseek_v2",
        "minicpm3": "minicpm3",
        "gpt2": "gpt2",
        "gptj": "gptj",
        "gptneox": "gpt_neox",
        "falcon": "falcon",
        "bloom": "bloom",
        "mpt": "mpt",
        "gpt-oss": "gpt_oss",
        "llama4": "llama4_text",
        "granite": "granite",
        "granitemoe": "granitemoe",
        "granitehybrid": "granitemoehybrid",
        "nemotron": "nemotron",
        "nemotron_h": "nemotron_h",
        "nemotron_h_moe": "nemotron_h",
        "falcon-h1": "falcon_h1",
        "jamba": "jamba",
        "mamba": "mamba",
        "mamba2": "mamba2",
        "lfm2": "lfm2",
        "lfm2moe": "lfm2_moe",
        "smollm3": "smollm3",
        "seed_oss": "seed_oss",
        "stablelm": "stablelm",
        "glm4": "glm4",
        "glm4moe": "glm4_moe",
        "minimax-m2": "minimax_m2",
        "exaone": "exaone",
        "exaone4": "exaone4",
        "arcee": "arcee",
        "apertus": "apertus",
        "ernie4_5": "ernie4_5",
        "ernie4_5-moe": "ernie4_5_moe",
        "dots1": "dots1",
        "dbrx": "dbrx",
        "chatglm": "chatglm",
        "baichuan": "baichuan",
        "internlm2": "internlm2",
        "hunyuan-dense": "hunyuan_v1_dense",
        "hunyuan-moe": "hunyuan_v1_moe",
    }
)
"""GGUF architecture -> `model_type`. Others keep their name, and are refused by it."""

KEY_OF = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "v_head_dim": "attention.value_length",
        "sliding_window": "attention.sliding_window",
        "attention_chunk_size": "attention.chunk_size",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "num_nextn_predict_layers": "nextn_predict_layers",
        "full_attention_interval": "full_attention_interval",
        "conv_L_cache": "shortconv.l_cache",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "rope_theta": "rope.freq_base",
        "rope_local_base_freq": "rope.freq_base_swa",
        "rotary_dim": "rope.dimension_count",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "attention_multiplier": "attention.scale",
        "use_parallel_residual": "use_parallel_residual",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
        "expert_gating_func": "expert_gating_func",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
)
"""`config.json` field -> GGUF key behind the architecture's name.

A field whose key the file lacks is absent: the family's default holds.
"""

STATED_IF_ANY = frozenset(
    {
        "sliding_window",
        "head_dim",
        "num_key_value_heads",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "num_kv_shared_layers",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "q_lora_rank",
        "query_pre_attn_scalar",
        "partial_rotary_factor",
        "attn_layer_period",
        "attn_layer_offset",
        "original_max_position_embeddings",
    }
)
"""Fields whose key a file has wherever they hold: without it there is none, whatever the class's default."""

TOKEN_KEY_OF = MappingProxyType(
    {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
)


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The configuration that a GGUF header states, in `config.json` form."""
    arch = header.architecture
    values: dict[str, Any] = {}
    for field, key in KEY_OF.items():
        value = header.metadata.get(f"{arch}.{key}")
        if value is not None:
            values[field] = value if isinstance(value, int | float | str) else list(value)
    for field, key in TOKEN_KEY_OF.items():
        if key in header.metadata:
            values[field] = header.metadata[key]
    if "token_embd.weight" in header.tensors:
        values["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    elif "vocab_size" not in values and "tokenizer.ggml.tokens" in header.metadata:
        values["vocab_size"] = len(header.metadata["tokenizer.ggml.tokens"])
    if values.get("sliding_window") == 0:
        del values["sliding_window"]
    if values.get("num_experts") == 0:
        del values["num_experts"]
    if header.metadata.get(f"{arch}.attention.causal") is False:
        values["is_causal"] = False
    values["architectures"] = [arch]
    values["model_type"] = FAMILY_OF.get(arch, arch)
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    scaling = _rope_scaling(header, arch)
    if scaling is not None:
        values["rope_scaling"] = scaling
    pattern = header.metadata.get(f"{arch}.attention.sliding_window_pattern")
    if pattern is not None:
        _set_pattern(values, pattern)
    values["num_hidden_layers"] = values.get("num_hidden_layers", 0) - values.get(
        "num_nextn_predict_layers", 0
    )
    adapt = _ADAPTERS.get(arch)
    if adapt is not None:
        adapt(values, header)
    for field in ABSENT_FIELDS.get(values["model_type"], {}):
        if field in STATED_IF_ANY:
            values.setdefault(field, None)
    return values


def _rope_scaling(header: GGUFHeader, arch: str) -> Mapping[str, Any] | None:
    """Kind, factor and original length, where the file scales at all.

    `context_length` is the extended length already, so a factor is stated with the length it
    starts from.
    """
    kind = header.metadata.get(f"{arch}.rope.scaling.type")
    factor = header.metadata.get(f"{arch}.rope.scaling.factor")
    if kind in (None, "none") or not factor:
        return None
    original = header.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original is None:
        length = header.metadata.get(f"{arch}.context_length")
        original = int(length / factor) if length else None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    attention_factor = header.metadata.get(f"{arch}.rope.scaling.attn_factor")
    if attention_factor not in (None, 1.0):
        scaling["attention_factor"] = attention_factor
    log_multiplier = header.metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier")
    if log_multiplier is not None:
        scaling["yarn_log_multiplier"] = log_multiplier
    return scaling


def _set_pattern(values: dict[str, Any], pattern: Any) -> None:
    """A period, or one boolean per layer: whether it has the window."""
    if isinstance(pattern, Sequence):
        values["layer_types"] = [SLIDING if sliding else FULL for sliding in pattern]
    else:
        values["sliding_window_pattern"] = pattern


def _llama(values: dict[str, Any], header: GGUFHeader) -> None:
    """Llama with experts is Mixtral."""
    if values.get("num_experts"):
        values["model_type"] = "mixtral"


def _deepseek(values: dict[str, Any], header: GGUFHeader) -> None:
    """Head dims of the expanded form, and V3 by its routing biases."""
    read = _reader(header)
    rope_dim = read("rope.dimension_count")
    key_dim = read("attention.key_length_mla") or read("attention.key_length")
    value_dim = read("attention.value_length_mla") or read("attention.value_length")
    values["qk_rope_head_dim"] = rope_dim
    values["qk_nope_head_dim"] = key_dim - rope_dim if key_dim and rope_dim else None
    values["v_head_dim"] = value_dim
    values.setdefault("q_lora_rank", None)
    values.pop("head_dim", None)
    values.pop("rotary_dim", None)
    if any(".exp_probs_b" in name for name in header.tensors):
        values["model_type"] = "deepseek_v3"


def _delta_net(values: dict[str, Any], header: GGUFHeader) -> None:
    read = _reader(header)
    value_heads, width = read("ssm.time_step_rank"), read("ssm.inner_size")
    values["linear_num_key_heads"] = read("ssm.group_count")
    values["linear_key_head_dim"] = read("ssm.state_size")
    values["linear_num_value_heads"] = value_heads
    values["linear_value_head_dim"] = width // value_heads if width and value_heads else None
    values["linear_conv_kernel_dim"] = read("ssm.conv_kernel")


def _mamba(values: dict[str, Any], header: GGUFHeader) -> None:
    """Mamba 1 and 2; a list of KV heads with zeros says which layers have attention."""
    read = _reader(header)
    num_heads, width = read("ssm.time_step_rank"), read("ssm.inner_size")
    values["intermediate_size_mamba"] = width
    values["mamba_d_conv"] = read("ssm.conv_kernel")
    values["mamba_d_state"] = read("ssm.state_size")
    values["mamba_n_groups"] = read("ssm.group_count")
    if header.architecture not in ("mamba", "jamba"):
        values["mamba_n_heads"] = num_heads
        values["mamba_d_head"] = width // num_heads if width and num_heads else None
    elif header.architecture == "mamba":
        values["intermediate_size"] = width
    _layer_types_from_kv_heads(values, LINEAR)
    widths = values.get("intermediate_size")
    if isinstance(widths, list) and header.architecture.startswith("nemotron"):
        kinds = values.get("layer_types") or []
        values["layer_types"] = [
            "mlp" if width and kind != FULL else kind
            for kind, width in zip(kinds, widths, strict=True)
        ]
        values["intermediate_size"] = max(widths)


def _short_convolution(values: dict[str, Any], header: GGUFHeader) -> None:
    _layer_types_from_kv_heads(values, CONV)


def _gemma4(values: dict[str, Any], header: GGUFHeader) -> None:
    """`key_length` is the full layers', `key_length_swa` the window layers'."""
    read = _reader(header)
    values["global_head_dim"] = read("attention.key_length")
    values["head_dim"] = read("attention.key_length_swa") or read("attention.key_length")
    values.pop("v_head_dim", None)
    kv_heads, kinds = values.get("num_key_value_heads"), values.get("layer_types")
    if isinstance(kv_heads, list) and kinds:
        by_kind = dict(zip(kinds, kv_heads, strict=True))
        values["num_key_value_heads"] = by_kind.get(SLIDING)
        values["num_global_key_value_heads"] = by_kind.get(FULL)


def _layer_types_from_kv_heads(values: dict[str, Any], other: str) -> None:
    kv_heads = values.get("num_key_value_heads")
    if isinstance(kv_heads, list):
        values["layer_types"] = [FULL if heads else other for heads in kv_heads]
        values["num_key_value_heads"] = max(kv_heads)


def _reader(header: GGUFHeader) -> Callable[[str], Any]:
    return lambda key: header.metadata.get(f"{header.architecture}.{key}")


_ADAPTERS: Mapping[str, Callable[[dict[str, Any], GGUFHeader], None]] = MappingProxyType(
    {
        "llama": _llama,
        "deepseek2": _deepseek,
        "minicpm3": _deepseek,
        "mistral4": _deepseek,
        "qwen3next": _delta_net,
        "qwen35": _delta_net,
        "qwen35moe": _delta_net,
        "mamba": _mamba,
        "mamba2": _mamba,
        "jamba": _mamba,
        "granitehybrid": _mamba,
        "nemotron_h": _mamba,
        "nemotron_h_moe": _mamba,
        "falcon-h1": _mamba,
        "lfm2": _short_convolution,
        "lfm2moe": _short_convolution,
        "gemma4": _gemma4,
    }
)
