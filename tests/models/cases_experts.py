"""Models of experts and of latent attention."""

from __future__ import annotations

from tests.models.case_fields import EXPERTS, LATENT, YARN, small
from tests.models.harness import Case

EXPERT_CASES = [
    Case(
        "mixtral",
        "MixtralForCausalLM",
        small(num_local_experts=4, num_experts_per_tok=2),
        "mistralai--Mixtral-8x7B-Instruct-v0.1.json",
        drop=("head_dim",),
    ),
    Case(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        small(
            **EXPERTS, shared_expert_intermediate_size=56, num_hidden_layers=3, mlp_only_layers=[1]
        ),
    ),
    Case(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        small(head_dim=32, **EXPERTS),
        "Qwen--Qwen3-30B-A3B.json",
    ),
    Case(
        "olmoe",
        "OlmoeForCausalLM",
        small(num_experts=6, num_experts_per_tok=2, num_key_value_heads=4),
        "allenai--OLMoE-1B-7B-0924.json",
        drop=("head_dim",),
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
]
