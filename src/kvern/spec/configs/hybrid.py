"""Families with states: linear attention, Mamba, short convolutions, alone or between attention."""

from __future__ import annotations

from collections.abc import Sequence

from kvern.spec.configs.caches import (
    Caches,
    full_attention,
    gated_delta_net,
    index_keys,
    indexed_attention,
    kimi_delta_attention,
    latent_attention,
    lightning_attention,
    mamba1,
    mamba2,
    no_cache,
    short_convolution,
    sliding_attention,
)
from kvern.spec.configs.family import Family, variants
from kvern.spec.configs.latent import without_shared_index_keys
from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import (
    CONV,
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    Kinds,
    all_linear,
    from_counts,
    full_at_indices,
    full_at_offset,
    full_every,
)
from kvern.spec.configs.weights import (
    Block,
    Moe,
    gated_delta_net_weights,
    mamba1_weights,
    mamba2_weights,
    short_convolution_weights,
    with_mixer,
)
from kvern.spec.content import Heads
from kvern.spec.layers import KVCacheSpec
from kvern.spec.reach import All, Chunk

HYBRID = "hybrid"


def _qwen_indexed(config: Config) -> Caches:
    """Full attention; with an indexer, its key of one head beside it."""
    has_indexer = config.get("indexer_head_dim") is not None
    return indexed_attention(config) if has_indexer else full_attention(config)


def _kimi_kinds(config: Config) -> Kinds:
    """Full attention at the listed layers, counted from 1; by default every 4th and the last."""
    num_layers = config.num_layers
    full = config.table("linear_attn_config").integers("full_attn_layers")
    if full is None:
        full = (*range(4, num_layers + 1, 4), num_layers)
    return tuple(FULL if i + 1 in full else LINEAR for i in range(num_layers))


def _glm5_next_indexed(config: Config) -> Caches:
    """Latent attention whose index keys are pooled over `index_kpool` tokens.

    Until a pool is full its tokens' candidates and gates are kept, in the dtype of the keys.
    """
    pool = config.integer("index_kpool", default=1)
    [keys] = index_keys(config)
    if pool == 1:
        return (*latent_attention(config), keys)
    dim = config.integer("index_head_dim")
    return (
        *latent_attention(config),
        KVCacheSpec(keys.content, All(), stride=pool),
        KVCacheSpec(Heads(1, dim, dim), Chunk(pool)),
    )


def _nemotron_kinds(config: Config) -> Kinds:
    """A pattern such as "M-M*E": Mamba, feed-forward, attention, experts."""
    pattern = config.text("hybrid_override_pattern")
    if pattern is None:
        return _nemotron_counts(config)
    names = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    return tuple(names.get(letter, letter) for letter in pattern)


_nemotron_counts = from_counts((LINEAR, "_mamba_layers"), (FULL, "_attention_layers"))


def _nemotron_length(config: Config) -> Config:
    """The number of layers is the length of their list or pattern, and may not be stated apart."""
    if config.get("num_hidden_layers") is not None:
        return config
    kinds: Sequence[str] | None = None
    for name in ("layers_block_type", "layer_types"):
        kinds = kinds or config.strings(name)
    kinds = kinds or config.text("hybrid_override_pattern")
    if not kinds:
        return config
    return Config({**config.values, "num_hidden_layers": len(kinds)}, config.source)


def _minimax_kinds(config: Config) -> Kinds:
    """MiniMax-Text-01: `attn_type_list` has 1 for full and 0 for lightning attention."""
    types = config.integers("attn_type_list", config.num_layers)
    if types is not None:
        return tuple(FULL if kind else LINEAR for kind in types)
    return tuple(LINEAR if i % 2 else FULL for i in range(config.num_layers))


def _sala_kinds(config: Config) -> Kinds:
    mixers = config.strings("mixer_types", config.num_layers)
    if mixers is not None:
        names = {"minicpm4": FULL, "lightning": LINEAR, "lightning-attn": LINEAR}
        return tuple(names.get(mixer, mixer) for mixer in mixers)
    return from_counts((LINEAR, "_linear_layers"), (FULL, "_attention_layers"))(config)


def _attention_and_mamba2(config: Config) -> Caches:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    return full_attention(config) + mamba2(config)


def _kda_of_head_dim(config: Config) -> Config:
    """Ling: the linear heads have the number and width of the attention's."""
    own = {"linear_num_heads": config.num_heads, "linear_head_dim": config.head_dim}
    return Config({**own, **config.values}, config.source)


def _mamba_names(config: Config) -> Config:
    """The pure Mamba states its expanded width as `intermediate_size`."""
    width = config.get("intermediate_size")
    return Config({**config.values, "intermediate_size_mamba": width}, config.source)


def _mamba2_names(config: Config) -> Config:
    """The pure Mamba-2 has no other heads to tell its own from."""
    own = {"mamba_num_heads": config.get("num_heads"), "mamba_head_dim": config.get("head_dim")}
    return Config({**config.values, **own}, config.source)


def _all_hybrid(config: Config) -> Kinds:
    return (HYBRID,) * config.num_layers


QWEN_NEXT_MOE = Moe(shared_width="shared_expert_intermediate_size", shared_gate=True)
QWEN_NEXT = Block(
    "attention_bias", "attention_bias", qk_norm="head", gated_query=True, moe=QWEN_NEXT_MOE
)
QWEN_DENSE = Block("attention_bias", "attention_bias", qk_norm="head", gated_query=True)
DELTA = {FULL: full_attention, LINEAR: gated_delta_net}
DELTA_SCHEDULE = full_every(4, LINEAR, "full_attention_interval")

JAMBA_MOE = Moe(("intermediate_size",), every=("expert_layer_period", "expert_layer_offset"))
GRANITE_MOE = Moe(
    ("intermediate_size",), ("shared_intermediate_size",), shared_width="shared_intermediate_size"
)

HYBRID_FAMILIES: tuple[Family, ...] = (
    # --------------------------------------------------------------------------- gated delta nets
    Family(
        "qwen3_next",
        DELTA_SCHEDULE,
        DELTA,
        block=QWEN_NEXT,
        counter=with_mixer(gated_delta_net_weights),
        default_mtp_layers=1,
    ),
    *variants(
        Family(
            "qwen3_5_moe",
            DELTA_SCHEDULE,
            DELTA,
            block=QWEN_NEXT,
            counter=with_mixer(gated_delta_net_weights),
        ),
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ),
    *variants(
        Family(
            "qwen3_5",
            DELTA_SCHEDULE,
            DELTA,
            block=QWEN_DENSE,
            counter=with_mixer(gated_delta_net_weights),
        ),
        "qwen3_5",
        "qwen3_5_text",
    ),
    *variants(
        Family(
            "qwen4_exp",
            full_every(4, LINEAR, "full_attention_interval", full=INDEXED),
            {FULL: _qwen_indexed, INDEXED: _qwen_indexed, LINEAR: gated_delta_net},
        ),
        "qwen4_exp",
        "qwen4_exp_text",
    ),
    # --------------------------------------------------------------------- Kimi delta attention
    Family("kimi_linear", _kimi_kinds, {FULL: latent_attention, LINEAR: kimi_delta_attention}),
    Family(
        "bailing_hybrid",
        full_every(6, LINEAR, "layer_group_size"),
        {FULL: latent_attention, LINEAR: kimi_delta_attention},
        translate=_kda_of_head_dim,
    ),
    *variants(
        Family(
            "glm5_next",
            full_every(4, LINEAR, full=INDEXED),
            {
                FULL: _glm5_next_indexed,
                INDEXED: _glm5_next_indexed,
                LINEAR: kimi_delta_attention,
            },
            share=without_shared_index_keys,
        ),
        "glm5_next",
        "glm5_next_text",
    ),
    # ------------------------------------------------------------------------ lightning attention
    Family("minimax", _minimax_kinds, {FULL: full_attention, LINEAR: lightning_attention}),
    Family("minicpm_sala", _sala_kinds, {FULL: full_attention, LINEAR: lightning_attention}),
    # -------------------------------------------------------------------------------------- Mamba
    Family("mamba", all_linear, {LINEAR: mamba1}, translate=_mamba_names),
    Family("mamba2", all_linear, {LINEAR: mamba2}, translate=_mamba2_names),
    Family(
        "jamba",
        full_at_offset,
        {FULL: full_attention, LINEAR: mamba1},
        block=Block(moe=JAMBA_MOE),
        counter=with_mixer(mamba1_weights),
    ),
    Family(
        "bamba",
        full_at_indices("attn_layer_indices", LINEAR),
        {FULL: full_attention, LINEAR: mamba2},
    ),
    Family(
        "granitemoehybrid",
        all_linear,
        {FULL: full_attention, LINEAR: mamba2},
        block=Block("attention_bias", "attention_bias", moe=GRANITE_MOE),
        counter=with_mixer(mamba2_weights),
    ),
    Family(
        "nemotron_h",
        _nemotron_kinds,
        {FULL: full_attention, LINEAR: mamba2, "mlp": no_cache, "moe": no_cache},
        translate=_nemotron_length,
    ),
    Family("falcon_h1", _all_hybrid, {HYBRID: _attention_and_mamba2}),
    # -------------------------------------------------------------------------- short convolution
    Family(
        "lfm2",
        full_at_indices("full_attn_idxs", CONV),
        {FULL: full_attention, CONV: short_convolution, SLIDING: sliding_attention},
        block=Block(qk_norm="head"),
        counter=with_mixer(short_convolution_weights, CONV),
        ties_embeddings=True,
    ),
    Family(
        "lfm2_moe",
        full_at_indices("full_attn_idxs", CONV),
        {FULL: full_attention, CONV: short_convolution},
        ties_embeddings=True,
    ),
)
