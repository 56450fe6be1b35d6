"""kvern itself: the same `make_kv_plan` that the engine calls, so the numbers cannot differ."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from kvern.plan.engines import Engine
from kvern.plan.engines.base import activation_reserve, cdiv, largest_fitting
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Group, Pool, Step
from kvern.plan.shards import rank_model, stage_layers
from kvern.spec.budget import format_size
from kvern.spec.groups import make_kv_plan
from kvern.spec.layers import ModelSpec
from kvern.spec.pages import KVGroup, KVPlan, layer_bytes
from kvern.spec.reach import All, Chunk, Window

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_BATCHED_TOKENS = 512
RUNTIME_RESERVE = 256 * 2**20
SEARCH_LIMIT = 2**27


def kv_format_of(request: PlanRequest) -> str:
    """The format's name; bf16 unless one is asked for."""
    return "bf16" if request.kv_format in (None, "auto") else str(request.kv_format)


def block_size_of(request: PlanRequest) -> int:
    """Tokens of a block: as given, else 16, or what the format quantises together if more."""
    if request.block_size is not None:
        return request.block_size
    model = request.model.with_kv_format(kv_format_of(request))
    caches = [cache for layer in model.layers for cache in layer.caches]
    groups = {codec.token_group for cache in caches for _, codec in cache.streams}
    return lcm(DEFAULT_BLOCK_SIZE, *groups)


def format_on_stage(kv_format: str, layers: tuple[int, ...]) -> str:
    """A per-layer mix in the layer numbers of one pipeline stage."""
    default, *exceptions = kv_format.split(";")
    parts = [default]
    for exception in exceptions:
        spans, separator, name = exception.partition("=")
        for span in spans.split(",") if separator else ():
            first, _, last = span.strip().partition("-")
            wanted = range(int(first), int(last or first) + 1)
            parts += [f"{i}={name}" for i, layer in enumerate(layers) if layer in wanted]
    return ";".join(parts)


def stage_plan(request: PlanRequest, stage: int, kv_bytes: int | None) -> KVPlan:
    """The engine's own plan of the pool of one rank.

    Raises:
        CapacityError: the bytes do not hold one block beside the null block.
    """
    layers = stage_layers(request)[stage]
    model: ModelSpec = rank_model(request.model, request.tp, layers)
    kv_format = kv_format_of(request)
    if request.pp > 1:
        request.model.with_kv_format(kv_format)  # refuses layers that the whole model lacks
        kv_format = format_on_stage(kv_format, layers)
    return make_kv_plan(
        model,
        kv_format,
        block_size_of(request),
        None if kv_bytes is None else max(kv_bytes, 0),
        request.num_blocks,
        max_num_seqs=request.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
    )


def group_pages(group: KVGroup, num_tokens: int, scheduled: int, dcp: int) -> int:
    """Pages of one request on one rank: `dcp` ranks share what keeps every token."""
    shares = isinstance(group.spec.reach, All) and not group.is_state
    return group.pages_for(cdiv(num_tokens, dcp) if shares else num_tokens, scheduled)


def request_pages(plan: KVPlan, num_tokens: int, scheduled: int, dcp: int) -> int:
    """Pages of one request on one rank, over all groups."""
    return sum(group_pages(group, num_tokens, scheduled, dcp) for group in plan.groups)


def allocate(request: PlanRequest, budgets: tuple[Budget, ...]) -> Allocation:
    """Pool, capacity and admission of one replica."""
    by_stage: dict[tuple[int, int | None], KVPlan] = {}
    for budget in budgets:
        key = (budget.stage, budget.kv_bytes)
        if key not in by_stage:
            by_stage[key] = stage_plan(request, *key)
    plans = tuple(by_stage[b.stage, b.kv_bytes] for b in budgets)
    context = request.asked_context
    scheduled = min(request.max_batched_tokens or DEFAULT_BATCHED_TOKENS, context)
    num_blocks = tuple(plan.num_blocks for plan in plans)
    pool = min(num_blocks)
    plan = plans[num_blocks.index(pool)]
    dcp = request.dcp
    per_request = request_pages(plan, context, scheduled, dcp)
    needed = max(request_pages(p, context, scheduled, dcp) * p.page_bytes for p in plans)
    usable = pool - 1

    def holds(num_tokens: int) -> bool:
        step = min(scheduled, num_tokens)
        return all(request_pages(p, num_tokens, step, dcp) <= usable for p in plans)

    upper = max(context, request.model.max_model_len or SEARCH_LIMIT)
    concurrency = usable / per_request
    single = len(plan.groups) == 1 and not plan.groups[0].is_state
    block_size = min(
        (g.block_size for g in plan.groups if not g.is_state), default=plan.groups[0].block_size
    )
    capacity = usable * block_size * dcp if single else int(concurrency * context)
    return Allocation(
        block_size=block_size,
        block_bytes=tuple(p.page_bytes for p in plans),
        num_blocks=num_blocks,
        capacity_tokens=capacity,
        max_concurrency=concurrency,
        longest_context=largest_fitting(holds, upper),
        bytes_for_context=needed,
        fits=per_request <= usable,
        pools=_pools(plan, pool),
        groups=tuple(_group(n, g, context, scheduled, dcp) for n, g in enumerate(plan.groups)),
        blocks_per_request=per_request,
        steps=_steps(request, plan, pool, context, scheduled, capacity),
        used_bytes=tuple(pool * p.page_bytes + p.open_bytes for p in plans),
        request_bytes=lambda n: max(
            request_pages(p, n, min(scheduled, n), dcp) * p.page_bytes for p in plans
        ),
        usable_blocks=usable,
        blocks_of=lambda n: request_pages(plan, n, min(scheduled, n), dcp),
        shared_blocks_of=lambda n: sum(
            n // dcp // g.block_size for g in plan.groups if isinstance(g.spec.reach, All)
        ),
        assumptions=_assumptions(request, plan),
        extras={
            "open_bytes": plan.open_bytes,
            "row_bytes": plan.row_bytes(request.max_batched_tokens or DEFAULT_BATCHED_TOKENS),
            "pool_bytes": pool * plan.page_bytes,
            "waste_bytes": plan.waste,
        },
    )


def _kind(group: KVGroup) -> str:
    reach = group.spec.reach
    if group.is_state:
        return "state"
    if isinstance(reach, Window):
        return f"window ({reach.size:,})"
    if isinstance(reach, Chunk):
        return f"chunk ({reach.size:,})"
    return type(group.spec.content).__name__.lower()


def _group(number: int, group: KVGroup, context: int, scheduled: int, dcp: int) -> Group:
    return Group(
        name=f"group {number}",
        kind=_kind(group),
        num_layers=len(group.layers),
        block_size=group.block_size,
        page_bytes=group.page_bytes,
        blocks_per_request=group_pages(group, context, scheduled, dcp),
        page_waste_bytes=group.padding_bytes // group.pages_per_entry,
    )


def _pools(plan: KVPlan, num_blocks: int) -> tuple[Pool, ...]:
    pools: list[Pool] = []
    if len(plan.groups) == 1 and not plan.groups[0].is_state:
        group = plan.groups[0]
        keys = values = 0
        for caches in group.caches:
            for cache in caches:
                for stream, _, regions in cache.block_regions(group.block_size):
                    size = regions[-1].offset + regions[-1].num_bytes
                    keys, values = (
                        (keys, values + size) if stream.is_value else (keys + size, values)
                    )
        keys += group.page_bytes - keys - values
        pools.append(
            Pool(
                "kv",
                len(group.layers),
                num_blocks * group.block_size,
                k_bytes=keys * num_blocks,
                v_bytes=values * num_blocks,
            )
        )
    else:
        layers = {layer for group in plan.groups for layer in group.layers}
        pools.append(Pool("shared", len(layers), num_blocks, k_bytes=num_blocks * plan.page_bytes))
    if plan.open_bytes:
        cells = plan.num_open_blocks * sum(1 for g in plan.groups if g.open_page_bytes)
        pools.append(Pool("open blocks (bf16)", pools[0].layers, cells, k_bytes=plan.open_bytes))
    return tuple(pools)


def _steps(
    request: PlanRequest, plan: KVPlan, pool: int, context: int, scheduled: int, capacity: int
) -> tuple[Step, ...]:
    steps: list[Step] = []
    for number, group in enumerate(plan.groups):
        if number and group.caches == plan.groups[number - 1].caches:
            continue
        per_layer = sorted({layer_bytes(c, group.block_size) for c in group.caches})
        sizes = " or ".join(f"{size:,}" for size in per_layer)
        what = "state" if group.is_state else f"{group.block_size} tokens"
        padding = f" + {group.padding_bytes:,} B padding" if group.padding_bytes else ""
        pages = f" in {group.pages_per_entry} pages" if group.pages_per_entry > 1 else ""
        steps.append(
            Step(
                f"page of group {number} [{_kind(group)}]",
                f"{len(group.layers)} layers × {sizes} B per {what}{padding}",
                f"{group.page_bytes * group.pages_per_entry:,} B{pages}",
            )
        )
    if plan.open_bytes:
        steps.append(
            Step(
                "open blocks in bf16",
                f"{plan.num_open_blocks} sequences × "
                f"{sum(g.open_page_bytes for g in plan.groups):,} B",
                format_size(plan.open_bytes),
            )
        )
    if request.num_blocks is None:
        total = pool * plan.page_bytes + plan.open_bytes + plan.waste
        steps.append(
            Step(
                "blocks",
                f"({total:,} B - {plan.open_bytes:,} B open) // {plan.page_bytes:,} B",
                f"{pool:,} (the null block 0 is one of them)",
            )
        )
    dcp = request.dcp
    terms = []
    for number, group in enumerate(plan.groups):
        terms.append(f"group {number}: {group_pages(group, context, scheduled, dcp):,}")
    per_request = request_pages(plan, context, scheduled, dcp)
    share = f", of which a rank keeps one token in {dcp}" if dcp > 1 else ""
    steps.append(
        Step(
            f"blocks of one request of {context:,} tokens{share}",
            " + ".join(terms),
            f"{per_request:,}",
        )
    )
    steps.append(
        Step(
            "requests at once",
            f"({pool:,} - 1) / {per_request:,}",
            f"{(pool - 1) * 100 // per_request / 100:,.2f}",
        )
    )
    steps.append(Step("capacity", "usable blocks as tokens", f"{capacity:,} tokens"))
    return tuple(steps)


def _assumptions(request: PlanRequest, plan: KVPlan) -> tuple[str, ...]:
    notes: list[str] = []
    block_size = block_size_of(request)
    if request.block_size is None and block_size != DEFAULT_BLOCK_SIZE:
        notes.append(
            f"blocks of {block_size} tokens, which the format quantises together: give the engine "
            f"--block-size {block_size} too"
        )
    if plan.open_bytes and request.max_num_seqs is None:
        notes.append(
            f"{DEFAULT_MAX_NUM_SEQS} sequences keep an open block in bf16 (--max-num-seqs sets it)"
        )
    if len(plan.groups) > 1 and request.max_batched_tokens is None:
        notes.append(
            f"a step computes at most {DEFAULT_BATCHED_TOKENS} tokens of a request "
            "(--max-batched-tokens sets it)"
        )
    return tuple(notes)


def _utilization(_request: PlanRequest) -> float:
    return 0.9


def _reserve(request: PlanRequest) -> tuple[int, str]:
    tokens = request.max_batched_tokens or DEFAULT_BATCHED_TOKENS
    seqs = request.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    total = activation_reserve(request, tokens, seqs, RUNTIME_RESERVE)
    rows = max(_row_bytes(request, stage, tokens) for stage in range(request.pp))
    kept = f", {format_size(rows)} of rows in bf16" if rows else ""
    said = f"activations of {tokens} tokens{kept}, {format_size(RUNTIME_RESERVE)} runtime"
    return total + rows, said


def _row_bytes(request: PlanRequest, stage: int, tokens: int) -> int:
    """What narrow formats keep of a step, on one rank of a stage."""
    smallest = replace(request, num_blocks=2)
    return stage_plan(smallest, stage, None).row_bytes(tokens)


ENGINE = Engine("kvern", allocate, _utilization, _reserve)
