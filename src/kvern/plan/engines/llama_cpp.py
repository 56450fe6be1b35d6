"""llama.cpp: it allocates what the context asks for, so the answer is bytes, not blocks.

cells of a stream = context / streams, padded to 256
window cells      = pad256(min(cells, window * sequences of the stream + ubatch))
compressed cells  = pad256(cells / stride), a stream for each sequence
state cells       = sequences * (1 + rollback copies), always f32
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.plan.engines import Engine
from kvern.plan.engines.base import activation_reserve, canonical_format, cdiv, largest_fitting
from kvern.plan.engines.base import round_up as rounded
from kvern.plan.engines.llama_cpp_rules import (
    BLOCK_BYTES,
    DEFAULT_UBATCH,
    EXPANDED_LATENT_FAMILIES,
    IGNORED_WINDOW_FAMILIES,
    PAD,
    Rules,
    rules_of,
)
from kvern.plan.facts import (
    EXTRA_CONV_ELEMENTS,
    is_working_input,
    query_key_dim,
    value_head_dim,
)
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Group, Pool, Step
from kvern.plan.shards import RankCache, rank_caches, stage_layers, stage_of
from kvern.plan.versions import parse_version
from kvern.spec.budget import format_size
from kvern.spec.content import Heads, Index, Latent, State, StatePart
from kvern.spec.layers import ModelSpec
from kvern.spec.reach import Chunk, Window

RUNTIME_RESERVE = 512 * 2**20


@dataclass(frozen=True, slots=True)
class _Shape:
    """Streams and cells for one context."""

    num_slots: int
    num_streams: int
    cells: int
    ubatch: int
    rollback: int

    @property
    def slots_per_stream(self) -> int:
        return self.num_slots // self.num_streams

    def window_cells(self, window: int) -> int:
        wanted = window * self.slots_per_stream + self.ubatch
        return rounded(min(self.cells, wanted), PAD)


def _shape(request: PlanRequest, rules: Rules, context: int) -> _Shape:
    slots = request.slots or 1
    unified = (not rules.has_streams) if request.unified is None else request.unified
    streams = 1 if unified else slots
    return _Shape(
        num_slots=slots,
        num_streams=streams,
        cells=rounded(cdiv(context, streams) if unified else max(context // streams, 1), PAD),
        ubatch=request.ubatch or DEFAULT_UBATCH,
        rollback=request.speculative_tokens,
    )


def _formats(request: PlanRequest) -> tuple[str, str]:
    """Formats of keys and values: "q8_0", or "q8_0/q4_0" for different ones."""
    text = request.kv_format or "f16"
    text = "f16" if text.lower() == "auto" else text
    key, _, value = text.partition("/")
    formats = canonical_format(key, None), canonical_format(value or key, None)
    for name in formats:
        if name not in BLOCK_BYTES:
            raise UsageError(
                f"llama.cpp stores no KV format {name!r}: choose one of {', '.join(BLOCK_BYTES)}"
            )
    return formats


def _row_bytes(num_elements: int, kv_format: str) -> int:
    elements, num_bytes = BLOCK_BYTES[kv_format]
    if num_elements % elements:
        raise UsageError(
            f"{kv_format} needs rows of a multiple of {elements} elements, and a row of this "
            f"model's cache has {num_elements}: choose f16"
        )
    return num_elements // elements * num_bytes


def _elements(cache: RankCache, request: PlanRequest, storage: str) -> tuple[int, int]:
    """Key and value elements of one cell of one layer."""
    content = cache.content
    if isinstance(content, Heads):
        heads = content.num_kv_heads
        return heads * content.key_dim, heads * content.value_dim
    if isinstance(content, Index):
        return content.dim, 0
    assert isinstance(content, Latent)
    if storage == "heads":
        num_heads = request.model.num_attention_heads
        key_dim = query_key_dim(request.model, content)
        value_dim = value_head_dim(request.model)
        if num_heads is None or key_dim is None or value_dim is None:
            raise UsageError(
                f"{request.model.name} does not state its attention heads' sizes, which MLA "
                "stored as full heads needs: give --mla latent"
            )
        return num_heads * key_dim, num_heads * value_dim
    latent = content.latent_dim + content.rope_dim
    return latent, content.latent_dim if storage == "latent+values" else 0


def _limit(cache: RankCache, rules: Rules, family: str) -> int:
    """Window in tokens, 0 for a full cache."""
    if not rules.window_cache or family in IGNORED_WINDOW_FAMILIES:
        return 0
    if isinstance(cache.reach, Window):
        return cache.reach.size
    return cache.reach.size if isinstance(cache.reach, Chunk) else 0


def _storage(request: PlanRequest, rules: Rules) -> str:
    if request.mla is not None and request.mla not in ("heads", "latent", "latent+values"):
        raise UsageError(f"--mla {request.mla!r}: choose heads, latent or latent+values")
    if request.mla is None and request.model.family in EXPANDED_LATENT_FAMILIES:
        return "heads"
    return request.mla or rules.mla_storage


def _pools(
    request: PlanRequest, rules: Rules, caches: tuple[RankCache, ...], context: int
) -> tuple[Pool, ...]:
    shape = _shape(request, rules, context)
    key_format, value_format = _formats(request)
    storage = _storage(request, rules)
    index_values = _unread_values(caches) if rules.index_values else 0
    tables: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    layers: dict[tuple[str, int, int], set[int]] = {}
    for cache in caches:
        if isinstance(cache.content, State) or cache.content is None:
            continue
        key, value = _elements(cache, request, storage)
        is_index = isinstance(cache.content, Index)
        value = index_values if is_index else value
        limit = _limit(cache, rules, request.model.family)
        name = "index" if is_index else "window" if limit else "full"
        kind = (name, limit, cache.stride)
        row = _row_bytes(key, key_format), _row_bytes(value, value_format)
        tables.setdefault(kind, []).append(row)
        layers.setdefault(kind, set()).add(cache.layer)
    pools: list[Pool] = []
    for (name, limit, stride), rows in tables.items():
        cells, streams = shape.window_cells(limit) if limit else shape.cells, shape.num_streams
        if stride > 1:
            cells, streams = rounded(cdiv(cells, stride), PAD), shape.num_slots
        pools.append(
            Pool(
                name=name if stride == 1 else f"{name}, 1 of {stride}",
                layers=len(layers[name, limit, stride]),
                cells=cells,
                k_bytes=cells * streams * sum(k for k, _ in rows),
                v_bytes=cells * streams * sum(v for _, v in rows),
                streams=streams,
            )
        )
    pools += _compressor_pools(request.model, {cache.layer for cache in caches}, shape.num_slots)
    states = [cache.content for cache in caches if isinstance(cache.content, State)]
    if states:
        pools.append(_state_pool(states, shape, EXTRA_CONV_ELEMENTS.get(request.model.family, 0)))
    return tuple(pools)


def _unread_values(caches: tuple[RankCache, ...]) -> int:
    """Value elements beside an index key: one head's, where recurrent states are cached too."""
    heads = [c.content.value_dim for c in caches if isinstance(c.content, Heads)]
    return heads[0] if heads and any(c.is_state for c in caches) else 0


def _compressor_pools(model: ModelSpec, layers: set[int], num_slots: int) -> list[Pool]:
    """What compressors of latents still work on: rows of sums and weights, always f32."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for layer in model.layers:
        compresses = any(isinstance(c.content, Latent) and c.stride > 1 for c in layer.caches)
        if layer.index not in layers or not compresses:
            continue
        for cache in layer.caches:
            if is_working_input(layer, cache) and isinstance(cache.content, Heads):
                rows = cache.reach.size if isinstance(cache.reach, Window | Chunk) else 0
                counts[rows, cache.content.key_dim, cache.content.value_dim] += 1
    return [
        Pool(
            name=f"compressor, {rows} x {key_dim}",
            layers=count,
            cells=rows,
            streams=num_slots,
            state_bytes=count * rows * (key_dim + value_dim) * 4 * num_slots,
        )
        for (rows, key_dim, value_dim), count in counts.items()
    ]


def _state_pool(states: list[State], shape: _Shape, extra_elements: int) -> Pool:
    copies = shape.num_slots * (1 + shape.rollback)
    conv = 4 * extra_elements * copies
    other = 0
    for state in states:
        for part in state.parts:
            num_bytes = StatePart(part.name, part.shape, "fp32").num_bytes * copies
            if part.name == "conv":
                conv += num_bytes
            else:
                other += num_bytes
    return Pool(
        "state",
        len(states),
        shape.num_slots,
        state_bytes=conv + other,
        parts={"rollback_copies": shape.rollback, "conv": conv, "ssm": other},
    )


def allocate(request: PlanRequest, budgets: tuple[Budget, ...]) -> Allocation:
    """The pools for the asked context, and the longest context that the budget holds."""
    is_ik = request.engine.lower().startswith("ik_")
    rules = rules_of(parse_version(request.engine_version), is_ik)
    if request.tp > 1:
        # tensor rows are split by devices, the cache goes with the layers
        raise UsageError(
            "llama.cpp spreads a cache over devices by layers: use --pp N instead of --tp"
        )
    caches = tuple(c for c in rank_caches(request) if c.origin == "model")
    context = request.asked_context
    stages = stage_layers(request)
    pools = _pools(request, rules, caches, context)
    shape = _shape(request, rules, context)

    def bytes_on(stage: int, num_tokens: int) -> int:
        own = tuple(c for c in caches if stage_of(c.layer, stages) == stage)
        return sum(pool.bytes for pool in _pools(request, rules, own, num_tokens))

    used = tuple(bytes_on(b.stage, context) for b in budgets)
    limits = [b.kv_bytes for b in budgets]
    fits = all(limit is None or u <= limit for u, limit in zip(used, limits, strict=True))

    def holds(num_tokens: int) -> bool:
        return all(
            b.kv_bytes is None or bytes_on(b.stage, num_tokens) <= b.kv_bytes for b in budgets
        )

    upper = max(context, request.model.max_model_len or context)
    longest = upper if holds(upper) else largest_fitting(holds, upper)
    one_slot = shape.cells * shape.num_streams
    return Allocation(
        block_size=1,
        block_bytes=tuple(u // max(one_slot, 1) for u in used),
        num_blocks=(one_slot,) * len(budgets),
        capacity_tokens=one_slot,
        max_concurrency=one_slot / context if shape.num_streams == 1 else float(shape.num_slots),
        longest_context=longest,
        bytes_for_context=max(used),
        fits=fits,
        pools=pools,
        groups=_groups(pools),
        blocks_per_request=one_slot,
        steps=_steps(request, pools, shape, context),
        used_bytes=used,
        request_bytes=lambda n: max(bytes_on(b.stage, n) for b in budgets),
        usable_blocks=one_slot,
        blocks_of=lambda num_tokens: num_tokens,
        shared_blocks_of=lambda num_tokens: num_tokens if shape.num_streams == 1 else 0,
        assumptions=_assumptions(request, shape, rules),
        extras={"streams": shape.num_streams, "total_bytes": sum(p.bytes for p in pools)},
    )


def _groups(pools: tuple[Pool, ...]) -> tuple[Group, ...]:
    return tuple(
        Group(p.name, p.name, p.layers, 1, p.bytes // (p.total_cells * p.layers), p.total_cells)
        for p in pools
    )


def _steps(
    request: PlanRequest, pools: tuple[Pool, ...], shape: _Shape, context: int
) -> tuple[Step, ...]:
    steps = [
        Step(
            "cells per stream",
            f"{context:,} tokens / {shape.num_streams} streams, padded to {PAD}",
            f"{shape.cells:,}",
        )
    ]
    key_format, value_format = _formats(request)
    for pool in pools:
        if pool.name == "state":
            copies = f"{shape.num_slots} slots × (1 + {shape.rollback} rollback copies)"
            each = pool.state_bytes // (pool.layers * pool.cells * (1 + shape.rollback))
            formula = f"{pool.layers} layers × {copies} × {each:,} B (f32)"
        else:
            rows = pool.total_cells * pool.layers
            streams = f"{pool.streams} streams × " if pool.streams > 1 else ""
            k_row, v_row = pool.k_bytes // rows, pool.v_bytes // rows
            stored = f"({k_row:,} B of {key_format} keys + {v_row:,} B of {value_format} values)"
            if pool.state_bytes:
                stored = f"{pool.state_bytes // rows:,} B (f32)"
            formula = f"{streams}{pool.cells:,} cells × {pool.layers} layers × {stored}"
        steps.append(Step(f"{pool.name} cache", formula, format_size(pool.bytes)))
    return tuple(steps)


def _assumptions(request: PlanRequest, shape: _Shape, rules: Rules) -> tuple[str, ...]:
    caches = rank_caches(request)
    notes = []
    has_window = any(isinstance(c.reach, Window) for c in caches)
    if has_window and request.model.family in IGNORED_WINDOW_FAMILIES:
        notes.append("every token is stored: llama.cpp does not read this family's window")
    elif request.ubatch is None and has_window:
        notes.append(f"micro-batch of {shape.ubatch} tokens (--ubatch sets it)")
    if any(isinstance(c.content, Latent) for c in caches) and request.mla is None:
        storage = _storage(request, rules)
        notes.append(f"MLA is stored as {storage} in this version (--mla sets it)")
    return tuple(notes)


def _utilization(_request: PlanRequest) -> float:
    return 1.0


def _reserve(request: PlanRequest) -> tuple[int, str]:
    ubatch = request.ubatch or DEFAULT_UBATCH
    total = activation_reserve(request, ubatch, ubatch, RUNTIME_RESERVE)
    return total, f"compute buffers for {ubatch} tokens, {format_size(RUNTIME_RESERVE)} runtime"


ENGINE = Engine("llama.cpp", allocate, _utilization, _reserve)
