"""Models that the planner's tests build from a few fields, so that they need no other file."""

from __future__ import annotations

from typing import Any

from kvern.spec.configs import load_model_spec
from kvern.spec.layers import ModelSpec


def llama(name: str = "model", **fields: Any) -> ModelSpec:
    """A Llama-shaped model; give num_hidden_layers, num_attention_heads and so on."""
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec({**values, **fields}, name)


def llama_70b() -> ModelSpec:
    return llama(
        "llama-70b",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    )


def llama_7b() -> ModelSpec:
    return llama("llama-7b", num_key_value_heads=32, intermediate_size=11008, vocab_size=32000)


def deepseek_v3(**fields: Any) -> ModelSpec:
    values = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec({**values, **fields}, "deepseek-v3")


def minicpm_3() -> ModelSpec:
    """A latent of 256 + 32 elements, which no engine but SGLang stores as such."""
    return deepseek_v3(
        model_type="minicpm3",
        architectures=["MiniCPM3ForCausalLM"],
        num_hidden_layers=62,
        hidden_size=2560,
        num_attention_heads=40,
        num_key_value_heads=40,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
    )


def gemma_4_26b() -> ModelSpec:
    """25 window layers of 8 × 256 and 5 full ones of 2 × 512."""
    return _gemma_4("gemma-4-26b", rounds=5, full_heads=2)


def gemma_4_12b() -> ModelSpec:
    """40 window layers of 8 × 256 and 8 full ones of 1 × 512."""
    return _gemma_4("gemma-4-12b", rounds=8, full_heads=1)


def _gemma_4(name: str, rounds: int, full_heads: int) -> ModelSpec:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * rounds
    values = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_global_key_value_heads": full_heads,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": kinds,
        "num_kv_shared_layers": 0,
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, name)


def gemma_3_270m() -> ModelSpec:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 3
    values = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": kinds,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "gemma-3-270m")


def qwen_hybrid_27b() -> ModelSpec:
    """48 gated delta layers and 16 full ones."""
    kinds = [*["linear_attention"] * 3, "full_attention"] * 16
    values = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": kinds,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
    }
    return load_model_spec(values, "qwen-27b")


def qwen_hybrid_35b() -> ModelSpec:
    """30 gated delta layers and 10 full ones of 2 KV heads."""
    values = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
    }
    return load_model_spec(values, "qwen-35b")


def kimi_linear() -> ModelSpec:
    """20 KDA layers and 7 MLA ones."""
    full = [4, 8, 12, 16, 20, 24, 27]
    values = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": 27,
        "hidden_size": 2304,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [n for n in range(1, 28) if n not in full],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 1048576,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "kimi-linear")


def gpt_oss(num_layers: int) -> ModelSpec:
    """Windows of 128 tokens on every other layer."""
    values = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "gpt-oss")


def nemotron_30b() -> ModelSpec:
    """23 Mamba-2 layers and 6 of attention."""
    values = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 52,
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
        "_attention_layers": 6,
        "_mamba_layers": 23,
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "nemotron-30b")


def qwen_sparse_hybrid() -> ModelSpec:
    """36 gated delta layers; 12 of sparse attention with index keys; an n-gram path's state."""
    values = {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "max_position_embeddings": 262144,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "qwen-sparse-hybrid")


def deepseek_v4(num_windows: int, num_sparse: int, num_heavy: int) -> ModelSpec:
    """Layers with windows alone, with 1 entry of 4 tokens, and with 1 of 128."""
    kinds = ["sliding_attention"] * num_windows
    kinds += ["compressed_sparse_attention"] * num_sparse
    kinds += ["heavily_compressed_attention"] * num_heavy
    values = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": len(kinds),
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "layer_types": kinds,
        "max_position_embeddings": 1048576,
        "torch_dtype": "bfloat16",
    }
    return load_model_spec(values, "deepseek-v4")
