"""The Llama family: RMS norm, rotary GQA without biases, SwiGLU. Llama 2 and 3, SmolLM2, TinyLlama, Mistral
without a window.
"""

from __future__ import annotations

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, DecoderConfig, Family, LayerConfig, RopeConfig, TensorNames
from kvern.models.families.common import integer, number, optional_integer


def describe(config: Config) -> DecoderConfig:
    """Read a Llama or Mistral configuration.

    Raises:
        ModelError: a field is missing or not a number.
        UnsupportedModelError: a sliding window or an activation other than silu.
    """
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise UnsupportedModelError(
            f"the model attends within a sliding window of {window} tokens, which the Llama decoder of this "
            "version does not compute; models without a window work"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"activation {activation!r} is not the Llama family's silu")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = optional_integer(config, "head_dim", hidden // heads)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    max_positions = optional_integer(config, "max_position_embeddings", 2048)
    rope = RopeConfig(
        theta=float(scaling.get("rope_theta", number(config, "rope_theta", 10000.0))),
        rotary_dim=optional_integer(config, "rotary_dim", head_dim),
        scaling=scaling,
        original_max_positions=max_positions,
    )
    layer = LayerConfig(
        num_heads=heads,
        num_kv_heads=optional_integer(config, "num_key_value_heads", heads),
        key_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        intermediate_size=integer(config, "intermediate_size"),
        activation="silu",
        rope=rope,
    )
    return DecoderConfig(
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=max_positions,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        layers=(layer,) * integer(config, "num_hidden_layers"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


HF_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{i}.input_layernorm.weight",
    q="model.layers.{i}.self_attn.q_proj.weight",
    k="model.layers.{i}.self_attn.k_proj.weight",
    v="model.layers.{i}.self_attn.v_proj.weight",
    output="model.layers.{i}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
)

GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    attention_norm="blk.{i}.attn_norm.weight",
    q="blk.{i}.attn_q.weight",
    k="blk.{i}.attn_k.weight",
    v="blk.{i}.attn_v.weight",
    output="blk.{i}.attn_output.weight",
    mlp_norm="blk.{i}.ffn_norm.weight",
    gate="blk.{i}.ffn_gate.weight",
    up="blk.{i}.ffn_up.weight",
    down="blk.{i}.ffn_down.weight",
    rope_factors="rope_freqs.weight",
)

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    gguf_architectures=("llama",),
    describe=describe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
)
