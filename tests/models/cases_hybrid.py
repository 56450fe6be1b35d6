"""Models with recurrent states between attention layers."""

from __future__ import annotations

from tests.models.case_fields import DELTA, EXPERTS, MAMBA, small
from tests.models.harness import Case

HYBRID = [
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
]
