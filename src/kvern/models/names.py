"""Where files keep each weight: the names that most families share, as a base to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names; ``{i}`` is the layer, ``{e}`` the expert. A bias is named as its weight.

    A norm that is None does not exist in the family: the norms named here decide what a layer
    computes.

    Attributes:
        attention_norm: before attention; `post_attention_norm`: on what attention adds; likewise
            `mlp_norm` and `post_mlp_norm`. In a parallel layer without `mlp_norm` both parts read
            the same normed input.
        qkv: one matrix for q, k and v, instead of three.
        gate_up: one matrix for gate and up, instead of two; `gate` None and no `gate_up`: not
            gated.
        expert_gate: a matrix per expert where the name has ``{e}``, else one tensor for all
            experts.
        expert_gate_up: gate and up of all experts in one tensor, if the file has it.
        expert_down_each: what to read where the file has no `expert_down` of all experts.
        experts_transposed: tensors of all experts are ``[experts, in, out]``.
        experts_interleaved: rows of `expert_gate_up` alternate: gate, up, gate, up.
        state_inputs: projections into a mixer with a state, stacked; `state_gates` likewise the
            second one.
        k_up, v_up: per head, the absorbed halves of `kv_up` (GGUF).
        rope_factors: ready-made divisors of the rotary frequencies (GGUF).
    """

    embedding: str
    final_norm: str
    head: str
    attention_norm: str | None = None
    post_attention_norm: str | None = None
    q: str = ""
    k: str = ""
    v: str = ""
    qkv: str | None = None
    output: str = ""
    q_norm: str = ""
    k_norm: str = ""
    sinks: str = ""
    q_down: str = ""
    q_down_norm: str = ""
    q_up: str = ""
    kv_down: str = ""
    kv_down_norm: str = ""
    kv_up: str = ""
    k_up: str = ""
    v_up: str = ""
    state_inputs: tuple[str, ...] = ()
    state_gates: tuple[str, ...] = ()
    state_conv: str = ""
    state_decay: str = ""
    state_step_bias: str = ""
    state_skip: str = ""
    state_norm: str = ""
    state_output: str = ""
    mlp_norm: str | None = None
    post_mlp_norm: str | None = None
    gate: str | None = None
    up: str = ""
    gate_up: str | None = None
    down: str = ""
    router: str = ""
    score_bias: str = ""
    router_norm: str = ""
    expert_scale: str = ""
    experts_norm: str = ""
    post_dense_norm: str = ""
    post_experts_norm: str = ""
    expert_gate: str = ""
    expert_up: str = ""
    expert_gate_up: str | None = None
    expert_down: str = ""
    expert_down_each: str = ""
    experts_transposed: bool = False
    experts_interleaved: bool = False
    shared_gate: str = ""
    shared_gate_up: str | None = None
    shared_up: str = ""
    shared_down: str = ""
    shared_router: str = ""
    positions: str = ""
    rope_factors: str | None = None
    layer_scale: str = ""
    per_layer_embedding: str = ""
    per_layer_input: str = ""
    per_layer_input_norm: str = ""
    per_layer_gate: str = ""
    per_layer_output: str = ""
    per_layer_output_norm: str = ""
    stream_router: str = ""
    stream_router_norm: str = ""
    stream_predict: str = ""
    stream_correct: str = ""
    stream_scale: str = ""
    stream_in: str = ""
    stream_out: str = ""
    laurel_down: str = ""
    laurel_up: str = ""
    laurel_norm: str = ""


_LAYER = "model.layers.{i}."

HF_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm=_LAYER + "input_layernorm.weight",
    q=_LAYER + "self_attn.q_proj.weight",
    k=_LAYER + "self_attn.k_proj.weight",
    v=_LAYER + "self_attn.v_proj.weight",
    output=_LAYER + "self_attn.o_proj.weight",
    q_norm=_LAYER + "self_attn.q_norm.weight",
    k_norm=_LAYER + "self_attn.k_norm.weight",
    sinks=_LAYER + "self_attn.sinks",
    q_down=_LAYER + "self_attn.q_a_proj.weight",
    q_down_norm=_LAYER + "self_attn.q_a_layernorm.weight",
    q_up=_LAYER + "self_attn.q_b_proj.weight",
    kv_down=_LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    kv_down_norm=_LAYER + "self_attn.kv_a_layernorm.weight",
    kv_up=_LAYER + "self_attn.kv_b_proj.weight",
    mlp_norm=_LAYER + "post_attention_layernorm.weight",
    gate=_LAYER + "mlp.gate_proj.weight",
    up=_LAYER + "mlp.up_proj.weight",
    down=_LAYER + "mlp.down_proj.weight",
    router=_LAYER + "mlp.gate.weight",
    score_bias=_LAYER + "mlp.gate.e_score_correction_bias",
    expert_gate=_LAYER + "mlp.experts.{e}.gate_proj.weight",
    expert_up=_LAYER + "mlp.experts.{e}.up_proj.weight",
    expert_down=_LAYER + "mlp.experts.{e}.down_proj.weight",
    shared_gate=_LAYER + "mlp.shared_experts.gate_proj.weight",
    shared_up=_LAYER + "mlp.shared_experts.up_proj.weight",
    shared_down=_LAYER + "mlp.shared_experts.down_proj.weight",
)
"""The names of Llama, which most families follow."""

_BLOCK = "blk.{i}."

GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    attention_norm=_BLOCK + "attn_norm.weight",
    q=_BLOCK + "attn_q.weight",
    k=_BLOCK + "attn_k.weight",
    v=_BLOCK + "attn_v.weight",
    output=_BLOCK + "attn_output.weight",
    q_norm=_BLOCK + "attn_q_norm.weight",
    k_norm=_BLOCK + "attn_k_norm.weight",
    sinks=_BLOCK + "attn_sinks.weight",
    q_down=_BLOCK + "attn_q_a.weight",
    q_down_norm=_BLOCK + "attn_q_a_norm.weight",
    q_up=_BLOCK + "attn_q_b.weight",
    kv_down=_BLOCK + "attn_kv_a_mqa.weight",
    kv_down_norm=_BLOCK + "attn_kv_a_norm.weight",
    kv_up=_BLOCK + "attn_kv_b.weight",
    k_up=_BLOCK + "attn_k_b.weight",
    v_up=_BLOCK + "attn_v_b.weight",
    mlp_norm=_BLOCK + "ffn_norm.weight",
    gate=_BLOCK + "ffn_gate.weight",
    up=_BLOCK + "ffn_up.weight",
    down=_BLOCK + "ffn_down.weight",
    router=_BLOCK + "ffn_gate_inp.weight",
    score_bias=_BLOCK + "exp_probs_b.bias",
    expert_gate=_BLOCK + "ffn_gate_exps.weight",
    expert_up=_BLOCK + "ffn_up_exps.weight",
    expert_down=_BLOCK + "ffn_down_exps.weight",
    shared_gate=_BLOCK + "ffn_gate_shexp.weight",
    shared_up=_BLOCK + "ffn_up_shexp.weight",
    shared_down=_BLOCK + "ffn_down_shexp.weight",
    rope_factors="rope_freqs.weight",
)
"""llama.cpp's names."""
