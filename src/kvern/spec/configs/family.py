"""What a family is, as far as its cache and its size are concerned.

A family's entry says in which order its layers have which kind, what each kind leaves in the cache,
and how its weights are counted. It does not say how to compute anything: decoders live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvern.spec.configs.caches import (
    Caches,
    chunked_attention,
    full_attention,
    sliding_attention,
)
from kvern.spec.configs.reader import Config
from kvern.spec.configs.schedule import (
    CHUNKED,
    FULL,
    SLIDING,
    Kinds,
    Schedule,
    all_full,
    check_kinds,
    stated_kinds,
)
from kvern.spec.configs.weights import Block, Counter, Weights, block_weights
from kvern.spec.layers import LayerSpec

CacheBuilder = Callable[[Config], Caches]

HEADS_BY_KIND: Mapping[str, CacheBuilder] = MappingProxyType(
    {FULL: full_attention, SLIDING: sliding_attention, CHUNKED: chunked_attention}
)
"""Kinds of attention with keys and values per head."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        name: `model_type` of the text configuration.
        schedule: layer kinds where the configuration does not list them.
        caches: what a layer of each kind leaves in the cache; the keys are the known kinds.
        block: the decoder block, for parameter counts; None = they are not counted.
        counter: makes the function that counts one layer's parameters from `block`.
        final_norm: vectors of the hidden size in the last norm: 1, 2 with a bias, 0 without weight.
        ties_embeddings: what an absent `tie_word_embeddings` means.
        learned_positions: extra rows of a learned position table, or None without one.
        embedding_norms: vectors of the hidden size that belong to the embedding.
        head_bias: whether the output layer has a bias.
        share: rewrites the layers of a model where some reuse another layer's cache.
        mtp_fields: fields with the number of multi-token-prediction layers.
        default_mtp_layers: their number where no field states it.
        mtp_kind: the kind of those layers.
        translate: renames this family's own spellings to the usual ones first.
    """

    name: str
    schedule: Schedule = all_full
    caches: Mapping[str, CacheBuilder] = field(default_factory=lambda: HEADS_BY_KIND)
    block: Block | None = None
    counter: Counter = block_weights
    final_norm: int = 1
    ties_embeddings: bool = False
    learned_positions: int | None = None
    embedding_norms: int = 0
    head_bias: bool = False
    share: Callable[[Config, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] | None = None
    mtp_fields: tuple[str, ...] = (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_layers",
        "num_mtp_modules",
    )
    default_mtp_layers: int = 0
    mtp_kind: str = FULL
    translate: Callable[[Config], Config] = field(default=lambda config: config)

    def kinds(self, config: Config) -> Kinds:
        """The kind of every layer.

        Raises:
            UnsupportedModelError: a kind that this family does not have.
        """
        kinds = stated_kinds(config) or self.schedule(config)
        check_kinds(config, kinds, self.caches)
        if len(kinds) != config.num_layers:
            config.refuse(f"{len(kinds)} layers are described and num_hidden_layers says otherwise")
        return kinds

    def layers(self, config: Config) -> tuple[LayerSpec, ...]:
        """Every layer with the caches it needs, in bf16."""
        kinds = self.kinds(config)
        by_kind = {kind: self.caches[kind](config) for kind in dict.fromkeys(kinds)}
        layers = tuple(LayerSpec(i, kind, by_kind[kind]) for i, kind in enumerate(kinds))
        return self.share(config, layers) if self.share else layers

    def mtp_layers(self, config: Config) -> tuple[LayerSpec, ...]:
        """Multi-token-prediction layers behind the decoder's own; their indices follow on."""
        number = config.integer(*self.mtp_fields, default=self.default_mtp_layers, minimum=0)
        if number == 0 or self.mtp_kind not in self.caches:
            return ()
        caches = self.caches[self.mtp_kind](config)
        first = config.num_layers
        return tuple(LayerSpec(first + i, self.mtp_kind, caches) for i in range(number))

    @property
    def weight_counter(self) -> Weights | None:
        """Counts one layer's parameters, or None where this family's are not counted."""
        return None if self.block is None else self.counter(self.block)


def variants(family: Family, *names: str) -> list[Family]:
    """The same description under several model types."""
    return [replace(family, name=name) for name in names]


def share_with_last_of_kind(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Gemma 3n and 4: the last `num_kv_shared_layers` layers read an earlier layer's cache.

    Each reads that of the last layer of its own kind that still stores one.
    """
    num_shared = config.integer("num_kv_shared_layers", default=0, minimum=0)
    if num_shared >= len(layers):
        config.refuse(f"num_kv_shared_layers is {num_shared} of {len(layers)} layers: none stores")
    num_own = len(layers) - num_shared
    last_of_kind = {layer.kind: layer.index for layer in layers[:num_own]}
    shared: list[LayerSpec] = list(layers[:num_own])
    for layer in layers[num_own:]:
        source = last_of_kind.get(layer.kind)
        if source is None:
            config.refuse(f"layer {layer.index} would share a {layer.kind} cache that none stores")
        caches = tuple(replace(cache, share_with=source) for cache in layer.caches)
        shared.append(replace(layer, caches=caches))
    return tuple(shared)
