"""Families with latent attention: MLA alone, with an indexer, or compressed."""

from __future__ import annotations

from kvern.spec.configs.caches import (
    Caches,
    compressor_inputs,
    index_keys,
    indexed_latent_attention,
    latent_attention,
)
from kvern.spec.configs.family import Family, variants
from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import FULL, INDEXED, SLIDING, Kinds, all_indexed
from kvern.spec.configs.weights import Block, Moe, latent_weights
from kvern.spec.content import Index, Latent
from kvern.spec.layers import KVCacheSpec, LayerSpec
from kvern.spec.reach import All, Chunk, Window

CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
_V4_KIND_OF_RATIO = {0: SLIDING, 4: CSA, 128: HCA}


def without_shared_index_keys(
    config: Config, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """GLM-5: a layer whose indexer is "shared" takes the selection of the layer before it.

    Such a layer keeps no index keys. The modes are listed (`indexer_types`), a pattern of F and S,
    or every `index_topk_freq`-th layer.
    """
    modes = config.strings("indexer_types", len(layers))
    if modes is None:
        pattern = config.get("index_topk_pattern")
        if pattern is not None:
            letters = pattern if isinstance(pattern, str) else config.strings("index_topk_pattern")
            modes = tuple({"F": "full", "S": "shared"}.get(mode, mode) for mode in letters or ())
        else:
            frequency = config.integer("index_topk_freq", default=1)
            offset = config.integer("index_skip_topk_offset", default=2, minimum=0)
            places = (max(i - offset + 1, 0) for i in range(len(layers)))
            modes = tuple("shared" if place % frequency else "full" for place in places)
    unknown = set(modes) - {"full", "shared"}
    if unknown or len(modes) != len(layers):
        config.refuse(f"indexer modes {sorted(unknown)} for {len(layers)} layers are not known")
    return tuple(
        _without_index(layer) if mode == "shared" else layer
        for layer, mode in zip(layers, modes, strict=True)
    )


def _without_index(layer: LayerSpec) -> LayerSpec:
    caches = tuple(cache for cache in layer.caches if not isinstance(cache.content, Index))
    return LayerSpec(layer.index, layer.kind, caches)


def _v4_latent(config: Config) -> Latent:
    """One head that is key and value at once; its last part is rotary."""
    head_dim = config.integer("head_dim")
    factor = config.get("partial_rotary_factor")
    rope_dim = config.optional_integer("qk_rope_head_dim", minimum=0)
    if factor is not None or rope_dim is None:
        rope_dim = int(head_dim * (0.125 if factor is None else factor))
    return Latent(head_dim - rope_dim, rope_dim)


def _v4_window(config: Config) -> Caches:
    return (KVCacheSpec(_v4_latent(config), Window(config.integer("sliding_window"))),)


def _v4_rate(config: Config, kind: str, legacy_name: str, default: int) -> int:
    stated = config.table("compress_rates").optional_integer(kind)
    return stated or config.integer(legacy_name, default=default)


def _v4_sparse(config: Config) -> Caches:
    """A compressed entry per 4 tokens from two overlapping groups, and an index key beside it."""
    rate = _v4_rate(config, CSA, "compress_rate_csa", 4)
    entries = KVCacheSpec(_v4_latent(config), All(), stride=rate)
    [keys] = index_keys(config)
    inputs = Window(2 * rate)
    return (
        *_v4_window(config),
        entries,
        KVCacheSpec(keys.content, All(), stride=rate),
        compressor_inputs(2 * config.integer("head_dim"), inputs),
        compressor_inputs(2 * config.integer("index_head_dim"), inputs),
    )


def _v4_heavy(config: Config) -> Caches:
    """A compressed entry per 128 tokens, from groups that do not overlap."""
    rate = _v4_rate(config, HCA, "compress_rate_hca", 128)
    return (
        *_v4_window(config),
        KVCacheSpec(_v4_latent(config), All(), stride=rate),
        compressor_inputs(config.integer("head_dim"), Chunk(rate)),
    )


def _v4_kinds(config: Config) -> Kinds:
    ratios = config.integers("compress_ratios")
    if ratios is not None:
        kinds = (_V4_KIND_OF_RATIO.get(ratio, f"ratio {ratio}") for ratio in ratios)
        return tuple(kinds)[: config.num_layers]
    return tuple(HCA if i < 2 or i % 2 == 0 else CSA for i in range(config.num_layers))


DEEPSEEK = Moe(
    shared_count="n_shared_experts", correction_bias=True, dense_first="first_k_dense_replace"
)
DEEPSEEK_V2 = Moe(shared_count="n_shared_experts", dense_first="first_k_dense_replace")
MLA = {FULL: latent_attention}
MLA_INDEXED = {INDEXED: indexed_latent_attention, FULL: indexed_latent_attention}


def _block(moe: Moe | None) -> Block:
    return Block(qkv_bias="attention_bias", moe=moe)


LATENT_FAMILIES: tuple[Family, ...] = (
    Family(
        "deepseek_v2",
        caches=MLA,
        block=_block(DEEPSEEK_V2),
        counter=latent_weights,
    ),
    *variants(
        Family(
            "deepseek_v3",
            caches=MLA,
            block=_block(DEEPSEEK),
            counter=latent_weights,
        ),
        "deepseek_v3",
        "kimi_k2",
        "kimi_k25",
        "glm4_moe_lite",
    ),
    Family(
        "mistral4",
        caches=MLA,
        block=_block(DEEPSEEK_V2),
        counter=latent_weights,
    ),
    Family(
        "minicpm3",
        caches=MLA,
        block=_block(None),
        counter=latent_weights,
        ties_embeddings=True,
    ),
    Family(
        "deepseek_v32",
        all_indexed,
        MLA_INDEXED,
        block=_block(DEEPSEEK),
        counter=latent_weights,
        mtp_kind=INDEXED,
    ),
    Family(
        "glm_moe_dsa",
        all_indexed,
        MLA_INDEXED,
        block=_block(DEEPSEEK),
        counter=latent_weights,
        mtp_kind=INDEXED,
        share=without_shared_index_keys,
    ),
    Family(
        "deepseek_v4",
        _v4_kinds,
        {SLIDING: _v4_window, CSA: _v4_sparse, HCA: _v4_heavy},
        mtp_kind=SLIDING,
    ),
)
