"""Dense models with keys and values per head: windows, scalings, shared caches."""

from __future__ import annotations

from tests.models.case_fields import FULL, GEMMA4, SLIDING, YARN, small
from tests.models.harness import Case

DENSE = [
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
        "qwen2", "Qwen2ForCausalLM", small(), "Qwen--Qwen2.5-0.5B-Instruct.json", drop=("head_dim",)
    ),
    Case(
        "qwen2-window",
        "Qwen2ForCausalLM",
        small(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    Case("qwen3", "Qwen3ForCausalLM", small(head_dim=32), "Qwen--Qwen3-8B.json"),
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
        "ministral3",
        "Ministral3ForCausalLM",
        small(rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}, head_dim=16),
        "mistralai--Ministral-3-8B-Base-2512.json",
    ),
    Case(
        "command-r",
        "CohereForCausalLM",
        small(),
        "CohereForAI--c4ai-command-r-v01.json",
        drop=("head_dim",),
    ),
]
