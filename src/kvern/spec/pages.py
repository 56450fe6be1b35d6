"""KV groups and the plan of the pool: uniform pages, and who lies where in them.

Layers that need the same thing form a *group* and share one block table. A block of a group is one
page: a contiguous run of `page_bytes` in the pool's slab. Pages of all groups are equally big, so
that one pool and one free list serve every group.

    slab     | page 0 (null) | page 1 | page 2 | ... | page num_blocks - 1 |
    page     | layer a: K, V | layer b: K, V | layer c: K, V | padding |
    stream   | head 0: slots 0..block_size-1 | head 1 | ...        [num_kv_heads, block_size, dim]

A group of states has entries instead of blocks: one entry holds the states of all its layers and
lies in `pages_per_entry` pages, filled one after the other.

Narrow formats (under 16 bits) keep blocks that are still open in bf16, in pages of their own kind:
`open_page_bytes` each, one per group and running sequence (`KVPlan.num_open_blocks` per group). Only
narrow streams lie in them. What a step computes for a narrow stream waits in a row buffer, bf16 too,
until the layer has attended; layers of one geometry share it (`row_buffers`).

    open page | layer a: K, V | layer c: K, V |                 (layer b is stored in bf16)
    rows      | row 0: head 0, head 1, ... | row 1 | ...         [max_num_batched_tokens, num_heads, dim]
"""

from __future__ import annotations

from dataclasses import dataclass

from kvern.spec.codec import BF16, Codec, Region
from kvern.spec.content import State, StatePart, Stream
from kvern.spec.layers import KVCacheSpec
from kvern.spec.reach import All, Chunk, Last, Window


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    Attributes:
        layers: decoder layers of the group, ascending.
        spec: the cache that each of them needs; its reach is the whole group's.
        block_size: token slots per block.
        page_bytes: bytes of one page, padding included; the same for every group of a plan.
        layer_caches: the caches of each layer, where they are not simply `spec`: layers of equal
            reach share pages although their bytes differ (index keys beside latents, a mix of
            formats). Empty = every layer has `spec` alone.
        pages_per_entry: pages of one state entry; 1 for every other content.
        open_page_bytes: bytes of one open block's narrow streams, or 0 when there are none.
    """

    layers: tuple[int, ...]
    spec: KVCacheSpec
    block_size: int
    page_bytes: int
    layer_caches: tuple[tuple[KVCacheSpec, ...], ...] = ()
    pages_per_entry: int = 1
    open_page_bytes: int = 0

    @property
    def caches(self) -> tuple[tuple[KVCacheSpec, ...], ...]:
        """The caches of every layer of the group, in page order."""
        return self.layer_caches or ((self.spec,),) * len(self.layers)

    @property
    def is_state(self) -> bool:
        """Whether the group holds states instead of blocks of tokens."""
        return self.spec.is_state

    @property
    def is_narrow(self) -> bool:
        """Whether some stream is sealed in another form than it was computed in."""
        return any(not cache.is_wide for caches in self.caches for cache in caches)

    @property
    def has_wide(self) -> bool:
        """Whether some stream is stored as it is computed, also while its block is open."""
        return any(
            codec.is_wide
            for caches in self.caches
            for cache in caches
            for _, codec in cache.streams
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of a block (or state entry) that carry something."""
        return sum(layer_bytes(caches, self.block_size) for caches in self.caches)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a block (or state entry) that carry nothing."""
        return self.page_bytes * self.pages_per_entry - self.used_bytes

    def pages_for(self, num_tokens: int, num_scheduled: int = 1) -> int:
        """The most pages that a sequence holds at once on its way to `num_tokens` tokens.

        Args:
            num_tokens: final length of the sequence.
            num_scheduled: the most tokens that one step computes for it.
        """
        if self.is_state:
            return self.pages_per_entry if num_tokens else 0
        reach = self.spec.reach
        all_blocks = -(-num_tokens // self.block_size)
        if isinstance(reach, All):
            return all_blocks
        if isinstance(reach, Last):
            return min(all_blocks, self._blocks_touched(num_scheduled + 1))
        run = reach.size - 1 + num_scheduled
        if isinstance(reach, Chunk) and reach.size % self.block_size == 0:
            return min(all_blocks, -(-run // self.block_size))
        sink_blocks = -(-reach.sinks // self.block_size) if isinstance(reach, Window) else 0
        return min(all_blocks, self._blocks_touched(run) + sink_blocks)

    def _blocks_touched(self, num_positions: int) -> int:
        """The most blocks that a run of positions can overlap, whatever its alignment."""
        return -(-(num_positions - 1) // self.block_size) + 1


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The pool: its groups, the size of its pages and their number.

    Attributes:
        groups: all KV groups; every cache of the model lies in exactly one.
        page_bytes: bytes of a page, the same for every group.
        num_blocks: pages of the pool, the null block 0 included.
        waste: bytes of the given memory that are left over behind the last whole page.
        num_open_blocks: open blocks per group in narrow formats (one per running sequence).
        lenders: layers whose cache later layers read too.
    """

    groups: tuple[KVGroup, ...]
    page_bytes: int
    num_blocks: int
    waste: int = 0
    num_open_blocks: int = 0
    lenders: frozenset[int] = frozenset()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the slab of uniform pages."""
        return self.num_blocks * self.page_bytes

    @property
    def open_bytes(self) -> int:
        """Bytes of the open blocks of narrow formats."""
        return self.num_open_blocks * sum(group.open_page_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """What `kv_memory` pays for: pool and open blocks."""
        return self.pool_bytes + self.open_bytes

    @property
    def row_buffers(self) -> dict[RowKey, int]:
        """The row buffers of narrow streams, each with its bytes per row."""
        return {
            row_key(entry, self.lenders): entry.stream.num_heads * entry.stream.dim * BF16.bits // 8
            for group in self.groups
            if group.open_page_bytes
            for streams in layer_offsets(group, open_form=True).values()
            for entry in streams
        }

    def row_bytes(self, max_num_batched_tokens: int) -> int:
        """Bytes of all row buffers of an engine whose steps compute up to so many tokens."""
        return max_num_batched_tokens * sum(self.row_buffers.values())

    def groups_of_layer(self, layer: int) -> tuple[KVGroup, ...]:
        """The groups that hold something of a layer; none for one that reads another's cache."""
        return tuple(group for group in self.groups if layer in group.layers)

    def pages_for(self, num_tokens: int, num_scheduled: int = 1) -> int:
        """The most pages that one sequence of `num_tokens` holds at once, over all groups."""
        return sum(group.pages_for(num_tokens, num_scheduled) for group in self.groups)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Where one stream of one layer lies in a page of its group.

    `regions` are relative to `offset`; the first one is the packed elements
    `[num_heads, num_entries, dim]`, scales and zero points follow.
    """

    layer: int
    stream: Stream
    codec: Codec
    offset: int
    num_bytes: int
    num_entries: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class StateOffset:
    """Where one part of one layer's state lies in an entry of its group.

    Byte b of an entry is byte `b % page_bytes` of the entry's page number `b // page_bytes`.
    """

    layer: int
    part: StatePart
    offset: int
    num_bytes: int


RowKey = tuple[str, int, int, int]
"""Which row buffer: (stream's name, heads, dim, layer or -1 for all that nobody else reads)."""


def row_key(entry: StreamOffset, lenders: frozenset[int]) -> RowKey:
    """The row buffer of a narrow stream: its rows must last until its last reader has attended."""
    layer = entry.layer if entry.layer in lenders else -1
    return entry.stream.name, entry.stream.num_heads, entry.stream.dim, layer


def layer_bytes(caches: tuple[KVCacheSpec, ...], block_size: int) -> int:
    """Bytes that one layer takes of a block, or of a state entry."""
    return sum(cache.fixed_bytes + cache.block_bytes(block_size) for cache in caches)


def layer_offsets(group: KVGroup, open_form: bool = False) -> dict[int, tuple[StreamOffset, ...]]:
    """Streams of every layer of a group, in page order and without gaps: K then V, layer by layer.

    Args:
        group: a group of token blocks.
        open_form: the layout of an open page, which has the narrow streams alone.
    """
    offset = 0
    layout: dict[int, tuple[StreamOffset, ...]] = {}
    for layer, caches in zip(group.layers, group.caches, strict=True):
        streams: list[StreamOffset] = []
        for cache in caches:
            stored = cache.open_regions if open_form else cache.block_regions
            for stream, codec, regions in stored(group.block_size):
                num_bytes = regions[-1].offset + regions[-1].num_bytes
                num_entries = regions[0].shape[1]
                streams.append(
                    StreamOffset(layer, stream, codec, offset, num_bytes, num_entries, regions)
                )
                offset += num_bytes
        layout[layer] = tuple(streams)
    return layout


def state_offsets(group: KVGroup) -> dict[int, tuple[StateOffset, ...]]:
    """Parts of every layer's state, in entry order and without gaps."""
    if not group.is_state:
        raise ValueError(f"the group of layers {group.layers} holds token blocks, not states")
    offset = 0
    layout: dict[int, tuple[StateOffset, ...]] = {}
    for layer, caches in zip(group.layers, group.caches, strict=True):
        parts: list[StateOffset] = []
        for content in (cache.content for cache in caches):
            assert isinstance(content, State)
            for part in content.parts:
                parts.append(StateOffset(layer, part, offset, part.num_bytes))
                offset += part.num_bytes
        layout[layer] = tuple(parts)
    return layout
