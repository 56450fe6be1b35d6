"""In which order a model's layers have which kind: explicit lists, patterns and periods."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvern.errors import UnsupportedModelError
from kvern.spec.configs.reader import Config

Kinds = tuple[str, ...]
Schedule = Callable[[Config], Kinds]

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
INDEXED = "indexed_attention"
LINEAR = "linear_attention"
CONV = "conv"

_OTHER_NAMES = {
    "attention": FULL,
    "global": FULL,
    "global_attention": FULL,
    "local": SLIDING,
    "local_attention": SLIDING,
    "mamba": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}


def stated_kinds(config: Config) -> Kinds | None:
    """The list of layer kinds that the configuration spells out, in today's names."""
    for name in ("layer_types", "layers_block_type", "layers_block_types"):
        listed = config.strings(name)
        if listed is not None:
            if len(listed) != config.num_layers:
                config.refuse(f"{name} has {len(listed)} entries for {config.num_layers} layers")
            return tuple(_OTHER_NAMES.get(kind, kind) for kind in listed)
    return None


def check_kinds(config: Config, kinds: Kinds, known: Collection[str]) -> None:
    """Every kind is one that the family's cache description knows.

    Raises:
        UnsupportedModelError: names the layer, its kind and the known kinds.
    """
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise UnsupportedModelError(
                f"{config.source}: layer {index} has the unknown kind {kind!r}, so its cache is "
                f"not known; this family's kinds are {', '.join(sorted(known))}"
            )


def all_full(config: Config) -> Kinds:
    """Full attention everywhere."""
    return (FULL,) * config.num_layers


def all_indexed(config: Config) -> Kinds:
    """Sparse attention with index keys everywhere."""
    return (INDEXED,) * config.num_layers


def all_linear(config: Config) -> Kinds:
    """A recurrent state everywhere."""
    return (LINEAR,) * config.num_layers


def window_if_set(config: Config) -> Kinds:
    """One window for all layers where `sliding_window` is set (Mistral, Phi-3)."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return (kind,) * config.num_layers


def window_from_layer(config: Config) -> Kinds:
    """Qwen: with `use_sliding_window`, a window from layer `max_window_layers` on."""
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return all_full(config)
    first = config.integer("max_window_layers", default=28, minimum=0)
    return tuple(SLIDING if i >= first else FULL for i in range(config.num_layers))


def window_everywhere_if_used(config: Config) -> Kinds:
    """Qwen3-MoE: with `use_sliding_window`, a window in all layers."""
    return window_if_set(config) if config.flag("use_sliding_window") else all_full(config)


def full_every(period: int, other: str = SLIDING, *fields: str, full: str = FULL) -> Schedule:
    """The last layer of every `period` is full, the others are `other`.

    `fields` name the configuration's own spellings of the period.
    """

    def schedule(config: Config) -> Kinds:
        each = config.integer(*fields, default=period) if fields else period
        return tuple(other if (i + 1) % each else full for i in range(config.num_layers))

    return schedule


def full_at_offset(config: Config) -> Kinds:
    """Jamba: attention at `attn_layer_offset` of every `attn_layer_period` layers."""
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset", minimum=0)
    return tuple(FULL if i % period == offset else LINEAR for i in range(config.num_layers))


def full_at_indices(field: str, other: str) -> Schedule:
    """Attention at the listed layers, `other` elsewhere; no list means attention everywhere."""

    def schedule(config: Config) -> Kinds:
        indices = config.integers(field)
        if indices is None:
            return all_full(config)
        return tuple(FULL if i in set(indices) else other for i in range(config.num_layers))

    return schedule


def from_counts(*counts: tuple[str, str]) -> Schedule:
    """Kinds of which only the numbers are noted, grouped by kind: totals hold, the order does not.

    Each count is (kind, field); the layers that no field counts feed forward only.
    """

    def schedule(config: Config) -> Kinds:
        kinds: list[str] = []
        for kind, field in counts:
            kinds += [kind] * config.integer(field)
        return tuple(kinds + ["mlp"] * (config.num_layers - len(kinds)))

    return schedule
