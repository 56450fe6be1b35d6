"""vLLM's grouping: equal pages, equal group sizes, padding layers that cost real memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from kvern.plan.engines import vllm_rules as rules_data
from kvern.plan.engines.base import cdiv, round_up
from kvern.plan.engines.vllm_layers import GROWING, PagedLayer, Setting

SMALL_BUCKET_FACTOR = 1.5
"""If the largest bucket is below this many times the smallest, its size becomes the group size."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        block_bytes: bytes that a block takes for this group on the whole model, padding included.
        padding_layers: layers added to make groups equal.
    """

    layers: tuple[PagedLayer, ...]
    padding_layers: int = 0

    def blocks(self, num_tokens: int, setting: Setting) -> int:
        """Blocks of one request."""
        return max(layer.blocks(num_tokens, setting) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups and the rule that turns them into bytes per block.

    Attributes:
        kind: "single" (one group), "shared" (equal groups share a pool), "pooled-index" (states
            lie over attention pages, pooled index keys apart) or "packed" (pages of several sizes side
            by side).
        packed_block_bytes: bytes of a block in a packed layout.
        extra_blocks: blocks of a request outside the groups.
        notes: what is worth telling about the layout.
    """

    kind: str
    groups: tuple[LayerGroup, ...]
    packed_block_bytes: int = 0
    extra_blocks: int = 0
    notes: tuple[str, ...] = ()

    def blocks_per_request(self, num_tokens: int, setting: Setting) -> int:
        """Blocks of one request over all groups."""
        return self.extra_blocks + sum(g.blocks(num_tokens, setting) for g in self.groups)

    def shared_blocks(self, num_tokens: int) -> int:
        """Whole blocks of a prefix that several requests can hold together."""
        firsts = (group.layers[0] for group in self.groups)
        return sum(num_tokens // x.block_size for x in firsts if x.kind in GROWING)

    def block_bytes(self, stage_layers: frozenset[int] | None = None) -> int:
        """Bytes of a block: on the whole model, or on the stage that holds `stage_layers`."""
        if self.kind == "packed":
            return self.packed_block_bytes
        if self.kind == "pooled-index":
            return sum(p.page_bytes for p in _on(self.groups[0].layers, stage_layers))
        return max(
            sum(layer.page_bytes for layer in _on(group.layers, stage_layers))
            for group in self.groups
        )

    @property
    def min_block_size(self) -> int:
        """The smallest block among groups that grow with the request."""
        sizes = [
            layer.block_size for g in self.groups for layer in g.layers if layer.kind != "state"
        ]
        return min(sizes or [layer.block_size for g in self.groups for layer in g.layers])


def _on(layers: Sequence[PagedLayer], stage: frozenset[int] | None) -> list[PagedLayer]:
    return [layer for layer in layers if stage is None or layer.layer in stage]


def make_layout(layers: tuple[PagedLayer, ...], hybrid: bool) -> Layout:
    """Groups for `layers`; without the hybrid manager window layers are charged in full."""
    notes: list[str] = []
    has_local = any(layer.kind in ("sliding", "chunked") for layer in layers)
    has_full = any(layer.kind in GROWING for layer in layers)
    if _is_compressed(layers):
        return _packed_layout(layers)
    if not hybrid and has_local and has_full:
        layers = tuple(
            layer.as_full() if layer.kind in ("sliding", "chunked") else layer for layer in layers
        )
        notes.append("window layers are charged for every token: no hybrid cache manager")
    if len({layer.key for layer in layers}) == 1 or _is_uniform_type(layers):
        return Layout("single", (LayerGroup(layers),), notes=tuple(notes))
    if _has_pooled_index(layers):
        return _pooled_index_layout(layers)
    hidden = [layer for layer in layers if layer.kind == "hidden"]
    paged = _unify_pages([layer for layer in layers if layer.kind != "hidden"])
    if paged is None:
        promoted = tuple(layer.as_full() for layer in layers if layer.kind != "hidden")
        notes.append("page sizes cannot be made equal: window layers are charged in full")
        return Layout("single", (LayerGroup(promoted),), notes=tuple(notes))
    groups = _equal_groups(paged)
    page = paged[0].page_bytes
    common = gcd(*(group.layers[0].block_size for group in groups))
    for layer in hidden:
        block = _largest_divisor(common, page // layer.token_bytes)
        groups.append(LayerGroup((layer.with_block(block, page),)))
    return Layout("shared", tuple(groups), notes=tuple(notes))


def _is_uniform_type(layers: Sequence[PagedLayer]) -> bool:
    if len({layer.block_size for layer in layers}) > 1:
        return False
    if all(layer.kind in GROWING and layer.stride == 1 for layer in layers):
        return True
    kinds = {(layer.kind, layer.limit) for layer in layers}
    return len(kinds) == 1 and layers[0].kind in ("sliding", "chunked")


def _unify_pages(layers: Sequence[PagedLayer]) -> list[PagedLayer] | None:
    """The layers with pages of one size, or None if MLA pages do not allow it."""
    largest = max(layer.page_bytes for layer in layers)
    unified: list[PagedLayer] = []
    for layer in layers:
        if layer.kind == "state" or layer.page_bytes == largest:
            unified.append(replace(layer, page_bytes=largest))
        elif largest % layer.page_bytes == 0:
            times = largest // layer.page_bytes
            unified.append(layer.with_block(layer.block_size * times, largest))
        elif layer.kind in ("mla", "index"):
            return None
        else:
            unified.append(replace(layer, page_bytes=largest))
    return unified


def _equal_groups(layers: Sequence[PagedLayer]) -> list[LayerGroup]:
    """Buckets of equal layers, cut into groups of one size."""
    buckets: dict[tuple[object, ...], list[PagedLayer]] = {}
    for layer in layers:
        buckets.setdefault(layer.key, []).append(layer)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = min(sizes)
    if max(sizes) < min(sizes) * SMALL_BUCKET_FACTOR:
        size = max(sizes)
    groups: list[LayerGroup] = []
    for bucket in buckets.values():
        count = cdiv(len(bucket), size)
        for start in range(count):
            members = tuple(bucket[start::count])  # every count-th: stages then get equal shares
            groups.append(LayerGroup(members, padding_layers=size - len(members)))
    return groups


def _largest_divisor(value: int, limit: int) -> int:
    return next(n for n in range(max(min(value, limit), 1), 0, -1) if value % n == 0)


# ----------------------------------------------------------------- pooled index keys and states

POOLED_BESIDE = ("mla", "full")
"""Kinds of layers that may have pooled index keys."""


def _has_pooled_index(layers: Sequence[PagedLayer]) -> bool:
    return (
        any(layer.kind == "index" and layer.stride > 1 for layer in layers)
        and any(layer.kind == "state" for layer in layers)
        and any(layer.kind in POOLED_BESIDE for layer in layers)
    )


def _pooled_index_layout(layers: tuple[PagedLayer, ...]) -> Layout:
    """States share the attention pages; index pages lie beside; the open pool of keys is a block.

    A drafter's window layers keep the MLA kernel's block of 64 tokens. A state that belongs to no
    layer of its own is a group by itself.
    """
    main = [layer for layer in layers if layer.kind in POOLED_BESIDE]
    indices = [layer for layer in layers if layer.kind == "index"]
    page = max(layer.page_bytes for layer in main)
    paged = [replace(layer, page_bytes=page) for layer in layers if layer.kind == "state"]
    states = [layer for layer in paged if layer.origin != "family"]
    count = cdiv(len(states), len(main))
    groups = [LayerGroup((*main, *indices))]
    groups += [LayerGroup(tuple(states[start::count])) for start in range(count)]
    groups += [LayerGroup((layer,)) for layer in paged if layer.origin == "family"]
    small = rules_data.MLA_BLOCK
    drafters = [x.with_block(small, x.token_bytes * small) for x in layers if x.kind == "sliding"]
    if drafters:
        groups.append(LayerGroup(tuple(drafters)))
    return Layout("pooled-index", tuple(groups), extra_blocks=1)


# -------------------------------------------------------------- compressed attention (DeepSeek-V4)


def _is_compressed(layers: Sequence[PagedLayer]) -> bool:
    return any(layer.kind in ("mla", "full") and layer.stride > 1 for layer in layers)


def _packed_layout(layers: tuple[PagedLayer, ...]) -> Layout:
    """Pages of several sizes side by side in one block; compressor states in tiny blocks.

    A block holds `tuples` times one page of each size. Window layers come in 64-token blocks, a
    compressor's state in blocks of 4 or 8 tokens that cost a whole block each.
    """
    growing: list[PagedLayer] = []
    windows: list[PagedLayer] = []
    states: dict[int, list[PagedLayer]] = {}
    for layer in layers:
        if layer.kind == "sliding":
            page = _aligned(rules_data.COMPRESSED_ENTRY_BYTES * rules_data.COMPRESSED_WINDOW_BLOCK)
            windows.append(layer.with_block(rules_data.COMPRESSED_WINDOW_BLOCK, page))
            continue
        entry = layer.token_bytes if layer.kind == "index" else rules_data.COMPRESSED_ENTRY_BYTES
        page = _aligned(entry * cdiv(layer.block_size, layer.stride))
        growing.append(replace(layer, page_bytes=page))
        if layer.stride > 1 and layer.kind != "index":
            states.setdefault(layer.stride, []).append(layer)
    per_size = Counter(layer.page_bytes for layer in growing)
    repeats = [max(per_size.values()), len(windows), *map(len, states.values())]
    tuples = _least_padding([n for n in repeats if n], lower=max(per_size.values()))
    count = cdiv(len(windows), tuples) if windows else 0
    groups = [LayerGroup(tuple(growing))]
    groups += [LayerGroup(tuple(windows[start::count])) for start in range(count)]
    for stride, compressed in sorted(states.items()):
        window = stride * (2 if stride == rules_data.OVERLAPPING_RATIO else 1)
        block = rules_data.COMPRESSOR_BLOCK.get(stride, rules_data.COMPRESSOR_BLOCK_DEFAULT)
        groups.append(
            LayerGroup(
                tuple(
                    replace(layer, kind="sliding", limit=window, block_size=block, stride=1)
                    for layer in compressed
                )
            )
        )
    sizes = sorted(per_size, reverse=True)
    note = f"a block holds {tuples} tuples of pages: {' + '.join(f'{s:,}' for s in sizes)} B"
    return Layout("packed", tuple(groups), packed_block_bytes=tuples * sum(sizes), notes=(note,))


def _aligned(num_bytes: int) -> int:
    return round_up(num_bytes, rules_data.COMPRESSED_ALIGNMENT)


def _least_padding(counts: Sequence[int], lower: int) -> int:
    """The group size that pads `counts` least; ties go to the larger size."""
    best, least = lower, -1
    for size in range(lower, max(counts) + 1):
        padding = sum(-count % size for count in counts)
        if least < 0 or padding <= least:
            best, least = size, padding
    return best
