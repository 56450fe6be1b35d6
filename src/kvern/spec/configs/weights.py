"""Exact parameter counts of a layer, from the widths that a configuration states.

A count is exact or absent: a width that the configuration lacks raises `MissingFieldError`, and the
model is then described without parameter counts. Buffers that training does not touch but files
store (the routers' correction biases) are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import INDEXED, LINEAR
from kvern.spec.layers import ExpertSpec, LayerParameters

Weights = Callable[[Config, str, int], LayerParameters]
Counter = Callable[["Block"], Weights]
Flag = bool | str
"""A constant, or the name of the configuration's boolean field, false where absent."""


@dataclass(frozen=True, slots=True)
class Moe:
    """How a family names and arranges its experts.

    Attributes:
        width: field names of an expert's intermediate size.
        dense_width: field names of the intermediate size of layers without experts.
        shared_count: field of a number of shared experts, each as wide as a routed one.
        shared_width: field of the width of one shared expert.
        shared_gate: whether that shared expert has a gate of one output.
        correction_bias: whether the router stores a bias per expert for balancing.
        bias: whether experts and router carry biases (gpt-oss).
        dense_first: field of the number of leading layers without experts.
        every: (step, offset) fields: layer i has experts when i % step == offset.
        gated: whether experts have a gate projection.
    """

    width: tuple[str, ...] = ("moe_intermediate_size",)
    dense_width: tuple[str, ...] = ("intermediate_size",)
    shared_count: str | None = None
    shared_width: str | None = None
    shared_gate: bool = False
    correction_bias: bool = False
    bias: bool = False
    dense_first: str | None = None
    every: tuple[str, str] | None = None
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """What one decoder block of a family consists of, in the terms that change its size."""

    qkv_bias: Flag = False
    out_bias: Flag = False
    qk_norm: str | None = None
    gated_query: bool = False
    sinks: bool = False
    mlp_width: tuple[str, ...] = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    mlp_width_factor: int | None = None
    gated_mlp: bool = True
    mlp_bias: Flag = False
    num_norms: int = 2
    norm_bias: bool = False
    moe: Moe | None = None


def expert_spec(config: Config, moe: Moe | None) -> ExpertSpec | None:
    """The experts that the configuration states, or None for a dense model."""
    num_experts = config.optional_integer(*EXPERT_COUNTS, minimum=0)
    if not num_experts:
        return None
    moe = moe or Moe()
    shared_count = config.optional_integer(moe.shared_count, minimum=0) if moe.shared_count else 0
    stated = config.integer(moe.shared_width, default=0, minimum=0) if moe.shared_width else 0
    shared_width = stated or None
    return ExpertSpec(
        num_experts=num_experts,
        num_experts_per_token=config.integer(*EXPERTS_PER_TOKEN, default=num_experts),
        intermediate_size=config.optional_integer(*moe.width),
        num_shared_experts=shared_count or int(shared_width is not None),
        shared_intermediate_size=shared_width,
    )


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")


def block_weights(block: Block) -> Weights:
    """Weights of an attention layer with its feed-forward part."""

    def weights(config: Config, kind: str, index: int) -> LayerParameters:
        feed_forward = feed_forward_weights(config, block, index)
        return replace(
            feed_forward,
            attention=attention_weights(config, block, kind),
            norms=norm_weights(config, block),
        )

    return weights


def with_mixer(mixer: Callable[[Config], int], kind: str = LINEAR) -> Counter:
    """Like `block_weights`, with another token mixer in the layers of one kind."""

    def counter(block: Block) -> Weights:
        attention_layers = block_weights(block)

        def weights(config: Config, layer_kind: str, index: int) -> LayerParameters:
            layer = attention_layers(config, layer_kind, index)
            return replace(layer, attention=mixer(config)) if layer_kind == kind else layer

        return weights

    return counter


def latent_weights(block: Block) -> Weights:
    """Weights of an MLA layer, with the indexer where its kind has one."""

    def weights(config: Config, kind: str, index: int) -> LayerParameters:
        attention = mla_weights(config, block)
        if kind == INDEXED:
            attention += indexer_weights(config)
        feed_forward = feed_forward_weights(config, block, index)
        return replace(feed_forward, attention=attention, norms=norm_weights(config, block))

    return weights


def attention_weights(config: Config, block: Block, kind: str) -> int:
    """Projections, biases and q/k norms of grouped-head attention."""
    hidden, num_heads, num_kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    key_dim = config.head_dim
    value_dim = config.optional_integer("v_head_dim") or key_dim
    query_width = num_heads * key_dim * (2 if block.gated_query else 1)
    qkv_width = query_width + num_kv_heads * (key_dim + value_dim)
    count = hidden * qkv_width + num_heads * value_dim * hidden
    if is_set(config, block.qkv_bias):
        count += qkv_width
    if is_set(config, block.out_bias):
        count += hidden
    if block.qk_norm == "head":
        count += 2 * key_dim
    elif block.qk_norm == "full":
        count += (num_heads + num_kv_heads) * key_dim
    return count + (num_heads if block.sinks else 0)


def mla_weights(config: Config, block: Block) -> int:
    """Down and up projections of multi-head latent attention, with their norms."""
    hidden, num_heads = config.hidden_size, config.num_heads
    rope_dim = config.integer("qk_rope_head_dim", minimum=0)
    nope_dim = config.integer("qk_nope_head_dim")
    value_dim, latent_dim = config.integer("v_head_dim"), config.integer("kv_lora_rank")
    query_width = num_heads * (nope_dim + rope_dim)
    if "q_lora_rank" not in config.values:
        config.integer("q_lora_rank")  # absent is unlike null: it is not known
    query_rank = config.optional_integer("q_lora_rank")
    if query_rank is None:
        query = hidden * query_width
    else:
        query = hidden * query_rank + query_rank + query_rank * query_width
    key_value = hidden * (latent_dim + rope_dim) + latent_dim
    key_value += latent_dim * num_heads * (nope_dim + value_dim)
    count = query + key_value + num_heads * value_dim * hidden
    if is_set(config, block.qkv_bias):
        count += (query_rank or 0) + latent_dim + rope_dim + hidden
    return count


def indexer_weights(config: Config) -> int:
    """The indexer of DeepSeek's sparse attention: queries, one key, its norm, head weights."""
    num_heads, dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    query = config.integer("q_lora_rank") * num_heads * dim
    return query + config.hidden_size * dim + 2 * dim + config.hidden_size * num_heads


def gated_delta_net_weights(config: Config) -> int:
    """Gated delta net: q, k, v, z, b and a projections, convolution, decay, norm, output."""
    value_heads = config.integer("linear_num_value_heads")
    value_head_dim = config.integer("linear_value_head_dim")
    key_width = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    value_width = value_heads * value_head_dim
    kernel = config.integer("linear_conv_kernel_dim")
    projections = config.hidden_size * (2 * key_width + 2 * value_width + 2 * value_heads)
    convolution = (2 * key_width + value_width) * kernel
    vectors = 2 * value_heads + value_head_dim
    return projections + convolution + vectors + value_width * config.hidden_size


def mamba1_weights(config: Config) -> int:
    """Jamba's Mamba mixer, with its norms on dt, B and C."""
    hidden = config.hidden_size
    channels = config.integer("mamba_expand") * hidden
    state_dim, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    stated_rank = config.get("mamba_dt_rank")
    rank = -(-hidden // 16) if stated_rank in (None, "auto") else config.integer("mamba_dt_rank")
    count = hidden * 2 * channels + channels * kernel + channels * (rank + 2 * state_dim)
    count += rank * channels + channels + channels * state_dim + channels + channels * hidden
    if config.flag("mamba_conv_bias", default=True):
        count += channels
    if config.flag("mamba_proj_bias"):
        count += 2 * channels + hidden
    return count + rank + 2 * state_dim


def mamba2_weights(config: Config) -> int:
    """Mamba-2 mixer: one input projection, convolution over x, B and C, gated norm, output."""
    num_heads = config.integer("mamba_n_heads", "mamba_num_heads")
    width = num_heads * config.integer("mamba_d_head", "mamba_head_dim")
    num_groups = config.integer("mamba_n_groups", "n_groups", default=1)
    state_dim = config.integer("mamba_d_state", "ssm_state_size")
    channels = width + 2 * num_groups * state_dim
    inputs = width + channels + num_heads
    count = config.hidden_size * inputs + channels * config.integer("mamba_d_conv", "conv_kernel")
    count += 3 * num_heads + width + width * config.hidden_size
    if config.flag("mamba_conv_bias", default=config.flag("use_conv_bias", default=True)):
        count += channels
    if config.flag("mamba_proj_bias"):
        count += inputs + config.hidden_size
    return count


def short_convolution_weights(config: Config) -> int:
    """LFM2's gated short convolution: input to three gates, depthwise kernel, output."""
    hidden = config.hidden_size
    count = 3 * hidden * hidden + hidden * config.integer("conv_L_cache") + hidden * hidden
    return count + (5 * hidden if config.flag("conv_bias") else 0)


def feed_forward_weights(config: Config, block: Block, index: int) -> LayerParameters:
    """The feed-forward part of one layer: dense, or experts with what is shared beside them."""
    if block.moe is not None and has_experts(config, block.moe, index):
        return expert_weights(config, block.moe)
    return LayerParameters(mlp=mlp_weights(config, block, dense_width(config, block, index)))


def mlp_weights(config: Config, block: Block, width: int) -> int:
    """One dense feed-forward network of a given width."""
    hidden = config.hidden_size
    count = (3 if block.gated_mlp else 2) * hidden * width
    if is_set(config, block.mlp_bias):
        count += (2 if block.gated_mlp else 1) * width + hidden
    return count


def dense_width(config: Config, block: Block, index: int) -> int:
    """Intermediate size of a layer without experts; a list states it per layer."""
    names = block.moe.dense_width if block.moe else block.mlp_width
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if value is None and block.mlp_width_factor is not None:
        return block.mlp_width_factor * config.hidden_size
    if isinstance(value, list):
        widths = config.integers(name, config.num_layers)
        return widths[index] if widths else 0
    return config.integer(name)


def has_experts(config: Config, moe: Moe, index: int) -> bool:
    """Whether a layer routes to experts."""
    if config.optional_integer(*EXPERT_COUNTS, minimum=0) == 0:
        return False
    stated = config.strings("mlp_layer_types", config.num_layers)
    if stated is not None:
        return stated[index] != "dense"
    if index in (config.integers("mlp_only_layers") or ()):
        return False
    moe_layers = config.integers("moe_layers")
    if moe_layers is not None:
        return index in moe_layers
    if moe.dense_first is not None:
        return index >= config.integer(moe.dense_first, minimum=0)
    if moe.every is not None:
        step = config.integer(moe.every[0], default=1)
        offset = config.integer(moe.every[1], default=step - 1, minimum=0)
        return index % step == offset
    return True


def expert_weights(config: Config, moe: Moe) -> LayerParameters:
    """Routed experts, router and shared experts of one layer."""
    hidden = config.hidden_size
    num_experts = config.integer(*EXPERT_COUNTS)
    width = config.integer(*moe.width)
    matrices = 3 if moe.gated else 2
    one_expert = matrices * hidden * width
    router = hidden * num_experts
    if moe.bias:
        one_expert += (matrices - 1) * width + hidden
        router += num_experts
    if moe.correction_bias:
        router += num_experts
    shared = 0
    if moe.shared_count is not None:
        shared = config.integer(moe.shared_count, minimum=0) * matrices * hidden * width
    elif moe.shared_width is not None:
        shared = matrices * hidden * config.integer(moe.shared_width, minimum=0)
        shared += hidden if moe.shared_gate else 0
    used = min(config.integer(*EXPERTS_PER_TOKEN), num_experts)
    return LayerParameters(
        mlp=shared,
        experts=num_experts * one_expert,
        router=router,
        active_experts=used * one_expert,
    )


def norm_weights(config: Config, block: Block) -> int:
    """Norms of the residual stream in one layer."""
    return block.num_norms * config.hidden_size * (2 if block.norm_bias else 1)


def is_set(config: Config, flag: Flag) -> bool:
    """A constant, or the boolean that the configuration states under that name."""
    return config.flag(flag) if isinstance(flag, str) else flag
