"""vLLM: the pool it builds and the lines it prints, by version.

available bytes / block bytes -> blocks; the smallest rank decides for all
a request's blocks = sum over groups of what each group must hold at that length
"GPU KV cache size"   up to 0.20: blocks // groups * block size;   later: concurrency * length
"""

from __future__ import annotations

from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.plan.engines import Engine
from kvern.plan.engines.base import activation_reserve, largest_fitting
from kvern.plan.engines.vllm_groups import Layout, make_layout
from kvern.plan.engines.vllm_layers import (
    PagedLayer,
    Setting,
    batched_tokens,
    in_flight_tokens,
    paged_layers,
    setting_of,
)
from kvern.plan.engines.vllm_rules import GRAPH_RESERVE, RUNTIME_RESERVE, Rules, rules_of
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Group, Pool, Step
from kvern.plan.shards import stage_layers, stage_of
from kvern.plan.versions import parse_version
from kvern.spec.budget import format_size

MAX_SEARCHED_CONTEXT = 2**27


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that one allocation needs."""

    request: PlanRequest
    rules: Rules
    setting: Setting
    layers: tuple[PagedLayer, ...]
    layout: Layout
    stages: tuple[frozenset[int], ...]
    context: int

    def blocks_per_request(self, num_tokens: int) -> int:
        return (
            self.layout.blocks_per_request(num_tokens, self.setting)
            + self.request.extra_blocks_per_request
        )

    def needed_bytes(self, num_tokens: int, stage: int) -> int:
        """What the start-up check wants for one request on a rank of `stage`."""
        if self.rules.admission == "layers" and self.layout.kind == "shared":
            return sum(
                layer.page_bytes * layer.blocks(num_tokens, self.setting)
                for layer in self.layers
                if layer.layer in self.stages[stage]
            )
        on_stage = None if self.rules.admission == "all-stages" else self.stages[stage]
        return self.layout.block_bytes(on_stage) * self.blocks_per_request(num_tokens)


def _prepare(request: PlanRequest) -> _Run:
    rules = rules_of(parse_version(request.engine_version))
    layers = paged_layers(request, rules)
    if not layers:
        raise UsageError(f"{request.model.name} leaves nothing in a cache: there is no pool")
    stages = stage_layers(request)
    members = [
        frozenset(x.layer for x in layers if stage_of(x.layer, stages) == stage)
        for stage in range(len(stages))
    ]
    has_chunks = any(layer.kind == "chunked" for layer in layers)
    # chunked local attention is slower under the hybrid manager, so it is off unless asked for
    hybrid = rules.hybrid_manager and not has_chunks if request.hybrid is None else request.hybrid
    return _Run(
        request=request,
        rules=rules,
        setting=setting_of(request, rules),
        layers=layers,
        layout=make_layout(layers, hybrid),
        stages=tuple(members),
        context=request.asked_context,
    )


def allocate(request: PlanRequest, budgets: tuple[Budget, ...]) -> Allocation:
    """Blocks, capacity and admission of one replica."""
    run = _prepare(request)
    block_bytes = tuple(run.layout.block_bytes(run.stages[b.stage]) for b in budgets)
    num_blocks = tuple(
        request.num_blocks if request.num_blocks is not None else (b.kv_bytes or 0) // size
        for b, size in zip(budgets, block_bytes, strict=True)
    )
    pool = min(num_blocks)
    tightest = num_blocks.index(pool)
    per_request = run.blocks_per_request(run.context)
    concurrency = pool / per_request
    if run.rules.is_v0:
        concurrency = pool * run.layout.min_block_size / run.context
    capacity = _printed_tokens(run, pool, per_request)
    available = tuple(_checked_bytes(run, b, s) for b, s in zip(budgets, block_bytes, strict=True))
    needed = [run.needed_bytes(run.context, b.stage) for b in budgets]
    longest = _longest(run, budgets, available)
    return Allocation(
        block_size=run.layout.min_block_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        capacity_tokens=capacity,
        max_concurrency=concurrency,
        longest_context=longest,
        bytes_for_context=max(needed),
        fits=all(n <= a for n, a in zip(needed, available, strict=True)),
        pools=_pools(run, pool, run.stages[budgets[tightest].stage]),
        groups=_groups(run),
        blocks_per_request=per_request,
        steps=_steps(run, pool, block_bytes[tightest], capacity, budgets[tightest]),
        used_bytes=tuple(pool * size for size in block_bytes),
        request_bytes=lambda n: max(run.needed_bytes(n, b.stage) for b in budgets),
        usable_blocks=max(pool - (not run.rules.is_v0), 0),
        blocks_of=run.blocks_per_request,
        shared_blocks_of=run.layout.shared_blocks,
        assumptions=_assumptions(run),
        extras=_extras(run, max(block_bytes)),
    )


def _printed_tokens(run: _Run, pool: int, per_request: int) -> int:
    if run.rules.tokens_print == "concurrency":
        return int(pool / per_request * run.context)
    num_groups = len(run.layout.groups)
    return pool // num_groups * run.layout.min_block_size * run.setting.dcp


def _checked_bytes(run: _Run, budget: Budget, block_bytes: int) -> int:
    """Bytes that the admission check counts as available on a rank."""
    available = budget.kv_bytes
    if available is None or run.request.num_blocks is not None:
        available = (run.request.num_blocks or 0) * block_bytes
    return available - block_bytes * run.rules.null_block_in_admission


def _longest(run: _Run, budgets: tuple[Budget, ...], available: tuple[int, ...]) -> int:
    upper = max(run.context, run.request.model.max_model_len or MAX_SEARCHED_CONTEXT)

    def fits(num_tokens: int) -> bool:
        return all(
            run.needed_bytes(num_tokens, budget.stage) <= limit
            for budget, limit in zip(budgets, available, strict=True)
        )

    return largest_fitting(fits, upper)


def _pools(run: _Run, pool: int, stage: frozenset[int]) -> tuple[Pool, ...]:
    """The pool of a rank of `stage`; groups that share one have no bytes of their own."""
    own = [layer for layer in run.layers if layer.layer in stage]
    k_bytes = v_bytes = state_bytes = 0
    for layer in own:
        share = layer.content_bytes * pool
        if layer.kind == "state":
            state_bytes += share
        elif layer.kind in ("mla", "index", "hidden") or len(layer.shape) < 4:
            k_bytes += share
        else:
            heads, key_dim, _, value_dim = layer.shape[:4]
            key_part = share * key_dim // (key_dim + value_dim) if heads else 0
            k_bytes, v_bytes = k_bytes + key_part, v_bytes + share - key_part
    if len(run.layout.groups) == 1:
        cells = pool * run.layout.min_block_size
        return (Pool("kv", len(own), cells, k_bytes, v_bytes, state_bytes),)
    total = pool * run.layout.block_bytes(stage)
    cells = pool // len(run.layout.groups) * run.layout.min_block_size
    return (Pool("shared", len(own), cells, k_bytes=total),)


def _groups(run: _Run) -> tuple[Group, ...]:
    groups: list[Group] = []
    for number, group in enumerate(run.layout.groups):
        first = group.layers[0]
        kinds = "+".join(dict.fromkeys(layer.kind for layer in group.layers))
        groups.append(
            Group(
                name=f"group {number}",
                kind=kinds + (f" ({first.limit:,})" if first.limit else ""),
                num_layers=len(group.layers),
                block_size=first.block_size,
                page_bytes=first.page_bytes,
                blocks_per_request=group.blocks(run.context, run.setting),
                padding_layers=group.padding_layers,
                page_waste_bytes=max(first.page_bytes - first.content_bytes, 0)
                if run.layout.kind != "packed"
                else 0,
            )
        )
    return tuple(groups)


def _steps(
    run: _Run, pool: int, block_bytes: int, capacity: int, budget: Budget
) -> tuple[Step, ...]:
    layout, context = run.layout, run.context
    steps = [_block_bytes_step(layout, block_bytes, run.stages[budget.stage])]
    if run.request.num_blocks is None and budget.kv_bytes is not None:
        formula = f"{budget.kv_bytes:,} B available // {block_bytes:,} B per block"
        steps.append(Step("blocks", formula, f"{pool:,}"))
    terms = [_group_term(g, run, context) for g in _merged(run)]
    if layout.extra_blocks:
        terms.append(f"{layout.extra_blocks} for the keys not pooled yet")
    if run.request.extra_blocks_per_request:
        terms.append(f"{run.request.extra_blocks_per_request} given")
    per_request = run.blocks_per_request(context)
    steps.append(
        Step(f"blocks of one request of {context:,} tokens", " + ".join(terms), f"{per_request:,}")
    )
    steps.append(
        Step("maximum concurrency", f"{pool:,} / {per_request:,}", f"{pool / per_request:.2f}x")
    )
    if run.rules.tokens_print == "concurrency":
        formula = f"int({pool:,} / {per_request:,} × {context:,})"
    else:
        dcp = f" × {run.setting.dcp} (dcp)" if run.setting.dcp > 1 else ""
        formula = f"{pool:,} // {len(layout.groups)} groups × {layout.min_block_size} tokens{dcp}"
    steps.append(Step('printed "GPU KV cache size"', formula, f"{capacity:,} tokens"))
    return tuple(steps)


def _block_bytes_step(layout: Layout, block_bytes: int, stage: frozenset[int]) -> Step:
    if layout.kind == "packed":
        return Step("bytes per block", layout.notes[0], f"{block_bytes:,} B")
    widest = max(
        layout.groups, key=lambda g: sum(x.page_bytes for x in g.layers if x.layer in stage)
    )
    pages: dict[int, int] = {}
    for layer in (x for x in widest.layers if x.layer in stage):
        pages[layer.page_bytes] = pages.get(layer.page_bytes, 0) + 1
    formula = " + ".join(f"{count} layers × {size:,} B" for size, count in pages.items())
    return Step("bytes per block (the widest group's pages)", formula, f"{block_bytes:,} B")


def _merged(run: _Run) -> list[tuple[int, PagedLayer, int]]:
    """Groups that take equal blocks, counted: (how many, a layer, blocks of each)."""
    merged: dict[tuple[object, ...], tuple[int, PagedLayer, int]] = {}
    for group in run.layout.groups:
        layer, blocks = group.layers[0], group.blocks(run.context, run.setting)
        key = (layer.kind, layer.block_size, layer.limit, blocks)
        count = merged[key][0] if key in merged else 0
        merged[key] = (count + 1, layer, blocks)
    return list(merged.values())


def _group_term(term: tuple[int, PagedLayer, int], run: _Run, context: int) -> str:
    count, layer, blocks = term
    size = layer.block_size
    if layer.kind == "sliding":
        held = f"min({layer.limit} - 1 + {run.setting.in_flight:,}, {context:,})"
        inner = f"ceil({held} / {size}) + 1"
    elif layer.kind == "chunked":
        inner = f"ceil(min({layer.limit} + {run.setting.in_flight:,}, {context:,}) / {size})"
    elif layer.kind == "state":
        inner = f"{blocks} states"
    else:
        dcp = f" / {run.setting.dcp}" if run.setting.dcp > 1 else ""
        inner = f"ceil({context:,}{dcp} / {size})"
    text = f"[{layer.kind}] {inner} = {blocks:,}"
    return text if count == 1 else f"{count} × ({text})"


def _assumptions(run: _Run) -> tuple[str, ...]:
    notes = list(run.layout.notes)
    kinds = {layer.kind for layer in run.layers}
    local = bool(kinds & {"sliding", "chunked"})
    given = run.request.max_batched_tokens is not None
    if local and not (given and run.rules.batches_in_flight == 1):
        tokens, why = in_flight_tokens(run.request, run.rules)
        hint = "" if given else "; --max-batched-tokens sets a step"
        notes.append(f"{tokens:,} tokens in flight ({why}{hint})")
    if "state" in kinds and run.request.state_mode is None:
        caching = "off" if run.rules.state_mode == "none" else "on"
        notes.append(
            f"recurrent states in mode {run.rules.state_mode!r}, as with prefix caching {caching} "
            "(--state-mode sets it)"
        )
    return tuple(notes)


def _extras(run: _Run, block_bytes: int) -> dict[str, object]:
    extras: dict[str, object] = {"num_groups": len(run.layout.groups)}
    if run.rules.is_v0:
        extras["cpu_blocks"] = run.request.swap_space // block_bytes
    return extras


def _utilization(request: PlanRequest) -> float:
    return rules_of(parse_version(request.engine_version)).utilization


def _reserve(request: PlanRequest) -> tuple[int, str]:
    rules = rules_of(parse_version(request.engine_version))
    tokens, _ = batched_tokens(request, rules)
    graphs = GRAPH_RESERVE if rules.graphs_in_budget else 0
    seqs = min(request.max_num_seqs or 256, tokens)
    total = activation_reserve(request, tokens, seqs, 0)
    total += RUNTIME_RESERVE + graphs
    why = f"activations of {tokens:,} tokens a step, {format_size(RUNTIME_RESERVE)} runtime"
    return total, why + (f", {format_size(graphs)} CUDA graphs" if graphs else "")


ENGINE = Engine("vllm", allocate, _utilization, _reserve)
