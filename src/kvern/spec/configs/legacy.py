"""Families from before the common layout: learned positions, own field names."""

from __future__ import annotations

from kvern.spec.configs.family import Family, variants
from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import FULL, SLIDING, Kinds
from kvern.spec.configs.weights import Block


def _renamed(config: Config, **usual_from_own: str) -> Config:
    values = dict(config.values)
    for usual, own in usual_from_own.items():
        if values.get(usual) is None and values.get(own) is not None:
            values[usual] = values[own]
    return Config(values, config.source)


def _gpt_names(config: Config) -> Config:
    return _renamed(
        config,
        num_hidden_layers="n_layer",
        hidden_size="n_embd",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )


def _gpt_bigcode_names(config: Config) -> Config:
    config = _gpt_names(config)
    kv_heads = 1 if config.flag("multi_query", default=True) else config.num_heads
    return Config({**config.values, "num_key_value_heads": kv_heads}, config.source)


def _falcon_names(config: Config) -> Config:
    """One KV head with `multi_query`, `num_kv_heads` in the newer architecture, else all heads."""
    config = _renamed(config, num_hidden_layers="n_layer", num_attention_heads="n_head")
    if config.flag("new_decoder_architecture"):
        kv_heads = config.integer("num_kv_heads", default=config.num_heads)
    else:
        kv_heads = 1 if config.flag("multi_query", default=True) else config.num_heads
    return Config({**config.values, "num_key_value_heads": kv_heads}, config.source)


def _chatglm_names(config: Config) -> Config:
    if config.get("position_encoding_2d") is not None:
        config.refuse(
            "the first ChatGLM attends to its prompt in both directions: a new token changes old "
            "positions, so nothing can be cached"
        )
    config = _renamed(
        config,
        num_hidden_layers="num_layers",
        max_position_embeddings="seq_length",
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size",
    )
    grouped = config.flag("multi_query_attention")
    kv_heads = config.integer("multi_query_group_num") if grouped else config.num_heads
    return Config({**config.values, "num_key_value_heads": kv_heads}, config.source)


def _mpt_names(config: Config) -> Config:
    config = _renamed(
        config,
        num_hidden_layers="n_layers",
        hidden_size="d_model",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    kv_heads = config.table("attn_config").optional_integer("kv_n_heads") or config.num_heads
    return Config({**config.values, "num_key_value_heads": kv_heads}, config.source)


def _bloom_names(config: Config) -> Config:
    return _renamed(
        config,
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        hidden_size="n_embed",
        max_position_embeddings="seq_length",
    )


def _gpt_neo_names(config: Config) -> Config:
    return _renamed(
        config,
        num_hidden_layers="num_layers",
        num_attention_heads="num_heads",
        sliding_window="window_size",
    )


def _gpt_neo_kinds(config: Config) -> Kinds:
    """`attention_types` is a list of (pattern, repetitions); absent means global and local."""
    names = {"global": FULL, "local": SLIDING}
    kinds: list[str] = []
    try:
        for pattern, repetitions in config.get("attention_types") or [[["global", "local"], 12]]:
            kinds += [names.get(kind, str(kind)) for kind in pattern] * int(repetitions)
    except (TypeError, ValueError):
        config.refuse("attention_types must be a list of pairs: a list of kinds, and a number")
    return tuple(kinds)


WITH_BIASES = Block(True, True, gated_mlp=False, mlp_bias=True, norm_bias=True, mlp_width_factor=4)
NEOX = Block("attention_bias", "attention_bias", gated_mlp=False, mlp_bias=True, norm_bias=True)


LEGACY_FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt2",
        block=WITH_BIASES,
        final_norm=2,
        ties_embeddings=True,
        learned_positions=0,
        translate=_gpt_names,
    ),
    Family(
        "gpt_bigcode",
        block=WITH_BIASES,
        final_norm=2,
        ties_embeddings=True,
        learned_positions=0,
        translate=_gpt_bigcode_names,
    ),
    Family(
        "gpt_neo",
        _gpt_neo_kinds,
        block=Block(
            False, True, gated_mlp=False, mlp_bias=True, norm_bias=True, mlp_width_factor=4
        ),
        final_norm=2,
        ties_embeddings=True,
        learned_positions=0,
        translate=_gpt_neo_names,
    ),
    Family("gpt_neox", block=NEOX, final_norm=2),
    *variants(
        Family(
            "gptj",
            block=Block(
                gated_mlp=False, mlp_bias=True, norm_bias=True, num_norms=1, mlp_width_factor=4
            ),
            final_norm=2,
            head_bias=True,
            translate=_gpt_names,
        ),
        "gptj",
        "codegen",
    ),
    Family(
        "opt",
        block=Block(
            "enable_bias", "enable_bias", gated_mlp=False, mlp_bias="enable_bias", norm_bias=True
        ),
        final_norm=2,
        ties_embeddings=True,
        learned_positions=2,
    ),
    Family(
        "bloom",
        block=WITH_BIASES,
        final_norm=2,
        ties_embeddings=True,
        embedding_norms=2,
        translate=_bloom_names,
    ),
    Family(
        "mpt",
        block=Block(gated_mlp=False, mlp_width_factor=4),
        ties_embeddings=True,
        translate=_mpt_names,
    ),
    Family("dbrx", translate=_mpt_names),
    Family(
        "falcon",
        block=Block(
            "bias",
            "bias",
            gated_mlp=False,
            mlp_bias="bias",
            norm_bias=True,
            num_norms=1,
            mlp_width_factor=4,
        ),
        final_norm=2,
        ties_embeddings=True,
        translate=_falcon_names,
    ),
    Family(
        "phi",
        block=Block(True, True, gated_mlp=False, mlp_bias=True, norm_bias=True, num_norms=1),
        final_norm=2,
        head_bias=True,
    ),
    Family(
        "chatglm",
        block=Block(qkv_bias="add_qkv_bias", mlp_bias="add_bias_linear"),
        translate=_chatglm_names,
    ),
    *variants(Family("persimmon"), "persimmon", "baichuan", "internlm2"),
)
