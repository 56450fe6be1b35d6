"""The small models that the families are tested with; each has every layer kind of its family."""

from __future__ import annotations

from typing import Any

from tests.models.harness import Case

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 151,
    "use_double_wide_mlp": True,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "shared_intermediate_size": 56,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}


def small(**fields: Any) -> dict[str, Any]:
    return {**SMALL, **fields}


CASES = [
    Case(
        "mistral",
        "MistralForCausalLM",
        small(sliding_window=7),
        "mistralai--Mistral-7B-v0.1.json",
        drop=("head_dim",),
    ),
    Case(
        "ministral",
        "MinistralForCausalLM",
        small(sliding_window=7, layer_types=[FULL, SLIDING], head_dim=16),
    ),
    Case(
        "mixtral",
        "MixtralForCausalLM",
        small(num_local_experts=4, num_experts_per_tok=2),
        "mistralai--Mixtral-8x7B-Instruct-v0.1.json",
        drop=("head_dim",),
    ),
    Case(
        "qwen2", "Qwen2ForCausalLM", small(), "Qwen--Qwen2.5-0.5B-Instruct.json", drop=("head_dim",)
    ),
    Case(
        "qwen2-window",
        "Qwen2ForCausalLM",
        small(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    Case(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        small(
            **EXPERTS, shared_expert_intermediate_size=56, num_hidden_layers=3, mlp_only_layers=[1]
        ),
    ),
    Case("qwen3", "Qwen3ForCausalLM", small(head_dim=32), "Qwen--Qwen3-8B.json"),
    Case(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        small(head_dim=32, **EXPERTS),
        "Qwen--Qwen3-30B-A3B.json",
    ),
    Case(
        "gemma",
        "GemmaForCausalLM",
        small(head_dim=32, num_key_value_heads=1),
        "google--gemma-7b-it.json",
    ),
    Case(
        "gemma2",
        "Gemma2ForCausalLM",
        small(head_dim=32, sliding_window=7, query_pre_attn_scalar=20, attn_logit_softcapping=5.0),
        "google--gemma-2-2b.json",
    ),
    Case(
        "gemma3",
        "Gemma3ForCausalLM",
        small(head_dim=32, sliding_window=7, num_hidden_layers=6, num_key_value_heads=1),
        "google--gemma-3-270m.json",
    ),
    Case(
        "gemma3n",
        "Gemma3nForCausalLM",
        small(
            num_hidden_layers=6,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
            num_kv_shared_layers=3,
            head_dim=16,
            sliding_window=6,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=140,
            laurel_rank=12,
            altup_num_inputs=3,
            activation_sparsity_pattern=[0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
            intermediate_size=[96, 96, 80, 80, 64, 64],
        ),
        "google--gemma-3n-E4B.json",
    ),
    Case(
        "gemma4",
        "Gemma4ForCausalLM",
        small(**GEMMA4),
        "google--gemma-4-E4B-it.json",
        drop=("num_global_key_value_heads",),
    ),
    Case(
        "gemma4-keys-are-values",
        "Gemma4ForCausalLM",
        small(
            **{**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
    ),
    Case(
        "gemma4-moe",
        "Gemma4ForCausalLM",
        small(
            **{
                **GEMMA4,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "use_double_wide_mlp": False,
                "global_head_dim": 16,
            },
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=40,
        ),
    ),
    Case(
        "phi3",
        "Phi3ForCausalLM",
        small(sliding_window=9),
        "microsoft--Phi-3-mini-4k-instruct.json",
        drop=("head_dim",),
    ),
    Case(
        "phi3-longrope",
        "Phi3ForCausalLM",
        small(
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.1, 1.2, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    Case(
        "llama-dynamic",
        "LlamaForCausalLM",
        small(
            max_position_embeddings=64,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
    ),
    Case("olmo2", "Olmo2ForCausalLM", small()),
    Case(
        "olmo3",
        "Olmo3ForCausalLM",
        small(sliding_window=7, num_hidden_layers=4),
        "allenai--Olmo-3-7B-Instruct.json",
        drop=("head_dim",),
    ),
    Case(
        "olmo3-yarn",
        "Olmo3ForCausalLM",
        small(sliding_window=7, num_hidden_layers=4, rope_scaling=YARN),
    ),
    Case(
        "olmoe",
        "OlmoeForCausalLM",
        small(num_experts=6, num_experts_per_tok=2, num_key_value_heads=4),
        "allenai--OLMoE-1B-7B-0924.json",
        drop=("head_dim",),
    ),
    Case("smollm3", "SmolLM3ForCausalLM", small(num_hidden_layers=4)),
    Case(
        "granite",
        "GraniteForCausalLM",
        small(
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.3,
            logits_scaling=4.0,
        ),
    ),
    Case(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 151,
            "num_hidden_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "openai-community--gpt2.json",
        drop=(
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
    Case(
        "pythia",
        "GPTNeoXForCausalLM",
        small(num_key_value_heads=4),
        "EleutherAI--pythia-1.4b.json",
        drop=("head_dim", "num_key_value_heads"),
    ),
    Case(
        "gpt-neox-serial",
        "GPTNeoXForCausalLM",
        small(num_key_value_heads=4, use_parallel_residual=False, rotary_pct=0.5),
    ),
    Case(
        "falcon-7b",
        "FalconForCausalLM",
        small(multi_query=True, bias=False),
        "tiiuae--falcon-7b.json",
        drop=("head_dim", "num_key_value_heads", "num_kv_heads"),
    ),
    Case("falcon-40b", "FalconForCausalLM", small(new_decoder_architecture=True, num_kv_heads=2)),
    Case(
        "falcon-serial",
        "FalconForCausalLM",
        small(multi_query=False, parallel_attn=False, bias=True),
    ),
    Case(
        "llama4",
        "Llama4ForCausalLM",
        small(
            head_dim=16,
            intermediate_size_mlp=80,
            num_local_experts=4,
            num_hidden_layers=4,
            attention_chunk_size=8,
            floor_scale=4,
            interleave_moe_layer_step=2,
            num_experts_per_tok=1,
        ),
        "meta-llama--Llama-4-Scout-17B-16E-Instruct.json",
    ),
    Case(
        "gpt-oss",
        "GptOssForCausalLM",
        small(
            head_dim=16,
            sliding_window=6,
            num_local_experts=6,
            num_experts_per_tok=2,
            swiglu_limit=1.0,
        ),
        "openai--gpt-oss-20b.json",
    ),
    Case(
        "deepseek-v2",
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        "deepseek-ai--DeepSeek-V2.json",
    ),
    Case(
        "deepseek-v2-lite",
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
        },
    ),
    Case(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "deepseek-ai--DeepSeek-V3.json",
    ),
    Case(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        {**LATENT, "dim_model_base": 32},
        "openbmb--MiniCPM3-4B.json",
    ),
    Case(
        "granitemoe",
        "GraniteMoeForCausalLM",
        small(
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_multiplier=0.2,
            residual_multiplier=0.3,
            logits_scaling=4.0,
        ),
    ),
    Case(
        "granite-4-h",
        "GraniteMoeHybridForCausalLM",
        small(**MAMBA, num_local_experts=0, layer_types=["mamba", "attention"]),
        "ibm-granite--granite-4.0-h-micro.json",
        drop=("head_dim",),
    ),
    Case(
        "granite-4-h-moe",
        "GraniteMoeHybridForCausalLM",
        small(
            **MAMBA,
            mamba_proj_bias=True,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["mamba", "attention"],
            position_embedding_type="rope",
        ),
    ),
    Case(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        small(
            head_dim=16, num_hidden_layers=4, **EXPERTS, shared_expert_intermediate_size=48, **DELTA
        ),
        "Qwen--Qwen3-Next-80B-A3B-Instruct.json",
    ),
    Case(
        "lfm2",
        "Lfm2ForCausalLM",
        small(
            layer_types=["conv", "full_attention"],
            conv_L_cache=4,
            conv_bias=True,
            block_multiple_of=16,
        ),
        "LiquidAI--LFM2.5-1.2B-Instruct.json",
        drop=("head_dim",),
    ),
    Case(
        "qwen3.5",
        "Qwen3_5ForCausalLM",
        small(head_dim=16, num_hidden_layers=4, **DELTA),
        "Qwen--Qwen3.5-0.8B.json",
    ),
    Case(
        "qwen3.5-moe",
        "Qwen3_5MoeForCausalLM",
        {
            k: v
            for k, v in small(
                head_dim=16,
                num_hidden_layers=4,
                **EXPERTS,
                shared_expert_intermediate_size=48,
                **DELTA,
            ).items()
            if k != "intermediate_size"
        },
        "Qwen--Qwen3.5-35B-A3B.json",
    ),
    Case(
        "nemotron-h",
        "NemotronHForCausalLM",
        small(
            head_dim=16,
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=12,
            n_groups=2,
            conv_kernel=4,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            moe_shared_expert_intermediate_size=48,
            n_group=2,
            topk_group=1,
        ),
        "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json",
    ),
    Case(
        "ministral3",
        "Ministral3ForCausalLM",
        small(rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}, head_dim=16),
        "mistralai--Ministral-3-8B-Base-2512.json",
    ),
    Case(
        "kimi-k2",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        "moonshotai--Kimi-K2-Thinking.json",
    ),
    Case(
        "glm-4.5",
        "Glm4MoeForCausalLM",
        small(
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            n_group=2,
            topk_group=1,
            attention_bias=True,
            use_qk_norm=True,
        ),
        "zai-org--GLM-4.5-Air.json",
    ),
    Case(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        small(head_dim=16, rotary_dim=8, num_local_experts=6, num_experts_per_tok=2),
        "MiniMaxAI--MiniMax-M2.5.json",
    ),
    Case(
        "command-r",
        "CohereForCausalLM",
        small(),
        "CohereForAI--c4ai-command-r-v01.json",
        drop=("head_dim",),
    ),
    Case(
        "starcoder2",
        "Starcoder2ForCausalLM",
        small(sliding_window=9),
        "bigcode--starcoder2-3b.json",
        drop=("head_dim",),
    ),
    Case(
        "opt",
        "OPTForCausalLM",
        {
            k: v
            for k, v in small(ffn_dim=96, word_embed_proj_dim=64, init_std=0.2).items()
            if k not in ("intermediate_size", "num_key_value_heads")
        },
        "facebook--opt-125m.json",
        drop=("num_key_value_heads", "head_dim"),
    ),
    Case(
        "gptj",
        "GPTJForCausalLM",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 8,
            "vocab_size": 151,
            "num_hidden_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "EleutherAI--gpt-j-6B.json",
        drop=(
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
    ),
]

IDS = [case.family for case in CASES]
