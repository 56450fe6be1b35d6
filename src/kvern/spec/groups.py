"""From a model's layers to a plan of the pool: equal needs together, pages of one size.

Layers of equal reach form a bucket. One bucket alone is one group, and its page has no padding.
Several buckets are cut into groups such that all of them fill pages of one size as well as
possible: 3 full and 15 window layers of equal bytes give six groups of 3 layers. A bucket of
lighter layers may take more tokens per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvern.errors import CapacityError, UsageError
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.pages import KVGroup, KVPlan, StreamOffset, layer_bytes, layer_offsets
from kvern.spec.reach import Reach

__all__ = ["KVGroup", "KVPlan", "StreamOffset", "layer_offsets", "make_kv_groups", "make_kv_plan"]

REFERENCE_TOKENS = 8192
"""Sequence length at which the candidates for a page size are compared."""

ACCEPTED_EXCESS = 1 / 32
"""Share of memory given up for fewer groups, hence fewer block tables to keep."""


BLOCK_MULTIPLES = (1, 2, 4, 8)
"""By how much the block of a light layer may exceed the block size asked for."""

Caches = tuple[KVCacheSpec, ...]
Parts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers whose caches have one reach, hence one lifetime: they can share a block table.

    Attributes:
        layers: decoder layers.
        caches: the caches of each layer that have the bucket's reach.
        grain: the smallest block possible: whole strides, a multiple of the block size asked for.
        sizes: bytes of each layer in a block of `grain` tokens (or in a state entry).
    """

    layers: tuple[int, ...]
    caches: tuple[Caches, ...]
    grain: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layers: tuple[int, ...], caches: tuple[Caches, ...], block_size: int) -> _Bucket:
        grain = lcm(block_size, *{cache.token_grain for layer in caches for cache in layer})
        bytes_of = {layer: layer_bytes(layer, grain) for layer in set(caches)}
        return cls(layers, caches, grain, tuple(bytes_of[layer] for layer in caches))

    @property
    def is_state(self) -> bool:
        return self.caches[0][0].is_state

    @property
    def whole(self) -> Parts:
        """All layers in one part."""
        return (tuple(range(len(self.layers))),)

    def packed(self, num_parts: int) -> Parts:
        """Positions of the layers in at most `num_parts` parts of nearly equal bytes.

        Equal layers are cut in order, full parts first; unequal ones go, heaviest first, to the
        lightest part so far.
        """
        sizes = self.sizes
        if len(set(sizes)) == 1:
            length = -(-len(sizes) // num_parts)
            starts = range(0, len(sizes), length)
            return tuple(tuple(range(s, min(s + length, len(sizes)))) for s in starts)
        parts: list[list[int]] = [[] for _ in range(num_parts)]
        filled = [0] * num_parts
        for position in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            lightest = filled.index(min(filled))
            parts[lightest].append(position)
            filled[lightest] += sizes[position]
        return tuple(tuple(sorted(part)) for part in parts)

    def part_bytes(self, parts: Parts) -> int:
        """Bytes of the heaviest part in a block of `grain` tokens."""
        return max(sum(self.sizes[i] for i in part) for part in parts)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A bucket in parts, one per group, with `block_size` tokens per block."""

    bucket: _Bucket
    parts: Parts
    block_size: int

    def groups(self, page_bytes: int) -> list[KVGroup]:
        return [self._group(part, page_bytes) for part in self.parts]

    def _group(self, part: tuple[int, ...], page_bytes: int) -> KVGroup:
        caches = tuple(self.bucket.caches[i] for i in part)
        used_bytes = sum(layer_bytes(layer, self.block_size) for layer in caches)
        spec = caches[0][0]
        return KVGroup(
            layers=tuple(self.bucket.layers[i] for i in part),
            spec=spec,
            block_size=self.block_size,
            page_bytes=page_bytes,
            layer_caches=() if set(caches) == {(spec,)} else caches,
            pages_per_entry=-(-used_bytes // page_bytes),
            open_page_bytes=_open_bytes(caches, self.block_size),
        )

    def cost(self, page_bytes: int) -> int:
        """Bytes that a sequence of `REFERENCE_TOKENS` takes, rounding and padding included."""
        group = KVGroup((), self.bucket.caches[0][0], self.block_size, page_bytes)
        return page_bytes * len(self.parts) * group.pages_for(REFERENCE_TOKENS)


def make_kv_groups(layers: Sequence[LayerSpec], block_size: int) -> tuple[KVGroup, ...]:
    """Groups of equal pages for the caches of `layers`, token groups before states.

    Args:
        layers: layers with their caches in the wanted formats.
        block_size: token slots per block; groups of lighter layers may take a multiple.

    Raises:
        UsageError: the block size does not fit a codec's token group.
    """
    _check_block_size(layers, block_size)
    buckets = _buckets(layers, block_size)
    token_buckets = [bucket for bucket in buckets if not bucket.is_state]
    state_buckets = [bucket for bucket in buckets if bucket.is_state]
    if token_buckets:
        page_bytes, cuts = _choose_cuts(token_buckets)
    else:
        page_bytes, cuts = sum(sum(bucket.sizes) for bucket in state_buckets), []
    cuts += [_Cut(bucket, bucket.whole, block_size) for bucket in state_buckets]
    return tuple(group for cut in cuts for group in cut.groups(page_bytes))


def make_kv_plan(
    model: ModelSpec,
    kv_format: str,
    block_size: int,
    kv_memory: int | None = None,
    num_blocks: int | None = None,
    *,
    max_num_seqs: int = 1,
) -> KVPlan:
    """Plan the pool of a model: groups, page size and number of blocks.

    Args:
        model: what the layers need.
        kv_format: a name of `KV_FORMATS` or a per-layer mix (see `parse_kv_format`).
        block_size: token slots per block.
        kv_memory: bytes to plan for; pool and open blocks together never exceed it.
        num_blocks: pages of the pool, the null block included; instead of or below `kv_memory`.
        max_num_seqs: sequences that run at once; narrow formats keep an open block for each.

    Raises:
        UsageError: unknown format, impossible block size, or neither memory nor blocks given.
        CapacityError: `kv_memory` is too small for one block beside the null block, or for
            `num_blocks`.
    """
    if kv_memory is None and num_blocks is None:
        raise UsageError("the size of the KV pool is open: give kv_memory or num_blocks")
    groups = make_kv_groups(model.with_kv_format(kv_format).layers, block_size)
    if not groups:
        raise UsageError(f"{model.name} leaves nothing in a cache: there is no pool to plan")
    page_bytes = groups[0].page_bytes
    has_open = any(group.open_page_bytes for group in groups)
    num_open_blocks = max_num_seqs if has_open else 0
    open_bytes = num_open_blocks * sum(group.open_page_bytes for group in groups)
    lenders = model.lenders
    if kv_memory is None:
        assert num_blocks is not None
        return KVPlan(groups, page_bytes, _checked(num_blocks), 0, num_open_blocks, lenders)
    fitting = max(kv_memory - open_bytes, 0) // page_bytes
    wanted = 2 if num_blocks is None else _checked(num_blocks)
    if fitting < wanted:
        raise CapacityError(
            f"a KV memory of {kv_memory:,} bytes holds {fitting} blocks of {page_bytes:,} bytes "
            f"beside {open_bytes:,} bytes of open blocks, and {wanted} are needed "
            f"(one is the null block): give at least {wanted * page_bytes + open_bytes:,} bytes"
        )
    num_blocks = fitting if num_blocks is None else num_blocks
    waste = kv_memory - open_bytes - num_blocks * page_bytes
    return KVPlan(groups, page_bytes, num_blocks, waste, num_open_blocks, lenders)


def _buckets(layers: Sequence[LayerSpec], block_size: int) -> list[_Bucket]:
    found: dict[tuple[Reach, bool], dict[int, list[KVCacheSpec]]] = {}
    for layer in layers:
        for cache in layer.caches:
            if cache.share_with is None:
                bucket = found.setdefault((cache.reach, cache.is_state), {})
                bucket.setdefault(layer.index, []).append(cache)
    return [
        _Bucket.of(tuple(bucket), tuple(map(tuple, bucket.values())), block_size)
        for bucket in found.values()
    ]


def _check_block_size(layers: Sequence[LayerSpec], block_size: int) -> None:
    if block_size < 1:
        raise UsageError(f"block size {block_size} is not possible: it must be positive")
    caches = {cache for layer in layers for cache in layer.caches}
    for codec in {codec for cache in caches for _, codec in cache.streams}:
        if block_size % codec.token_group:
            raise UsageError(
                f"block size {block_size} does not fit the KV format, which quantises "
                f"{codec.token_group} tokens together: choose a multiple of {codec.token_group}"
            )


def _choose_cuts(buckets: list[_Bucket]) -> tuple[int, list[_Cut]]:
    """The page size and cuts with the fewest groups among those that waste little.

    Candidates are the page sizes that cut some bucket into 1, 2, 3, ... groups.
    """
    if len(buckets) == 1:
        [bucket] = buckets
        return sum(bucket.sizes), [_Cut(bucket, bucket.whole, bucket.grain)]
    packings = [[b.packed(n) for n in range(1, len(b.layers) + 1)] for b in buckets]
    sized = [
        [(bucket.part_bytes(parts), parts) for parts in options]
        for bucket, options in zip(buckets, packings, strict=True)
    ]
    heaviest = max(max(bucket.sizes) for bucket in buckets)
    candidates = []
    for page_bytes in sorted({size for options in sized for size, _ in options}):
        if page_bytes < heaviest:
            continue
        pairs = zip(buckets, sized, strict=True)
        cuts = [_best_cut(bucket, options, page_bytes, heaviest) for bucket, options in pairs]
        cost = sum(cut.cost(page_bytes) for cut in cuts)
        candidates.append((sum(len(cut.parts) for cut in cuts), cost, page_bytes, cuts))
    limit = min(cost for _, cost, *_ in candidates) * (1 + ACCEPTED_EXCESS)
    accepted = [candidate for candidate in candidates if candidate[1] <= limit]
    _, _, page_bytes, cuts = min(accepted, key=lambda candidate: candidate[:3])
    return page_bytes, cuts


def _best_cut(
    bucket: _Bucket, options: list[tuple[int, Parts]], page_bytes: int, heaviest: int
) -> _Cut:
    """The cheapest cut into pages of `page_bytes`.

    A block may take more tokens as long as its layers stay lighter than the heaviest of the model.
    `options` are the bucket's packings, fewest parts first, each with the bytes of its heaviest
    part; a block of `m * grain` tokens takes m times as much.
    """
    cuts = []
    for multiple in BLOCK_MULTIPLES:
        if multiple > 1 and multiple * max(bucket.sizes) > heaviest:
            break
        fitting = (parts for size, parts in options if multiple * size <= page_bytes)
        parts = next(fitting, None)
        if parts is not None:
            cuts.append(_Cut(bucket, parts, multiple * bucket.grain))
    return min(cuts, key=lambda cut: (cut.cost(page_bytes), cut.block_size))


def _open_bytes(caches: tuple[Caches, ...], block_size: int) -> int:
    """Bytes of a group's open block: its narrow streams in bf16."""
    return sum(
        regions[-1].offset + regions[-1].num_bytes
        for layer in caches
        for cache in layer
        for _, _, regions in cache.open_regions(block_size)
    )


def _checked(num_blocks: int) -> int:
    if num_blocks < 2:
        raise UsageError(
            f"{num_blocks} blocks are too few: block 0 is the null block, so 2 or more"
        )
    return num_blocks
