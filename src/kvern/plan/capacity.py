"""The one public question: what fits, per rank, and which rank decides."""

from __future__ import annotations

from dataclasses import replace

from kvern.errors import CapacityError, KvernError, UsageError
from kvern.plan.advice import smallest_change, warnings_for
from kvern.plan.engines import Engine, load_engine
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Plan, RankPlan, Step
from kvern.plan.shards import stage_layers
from kvern.plan.versions import parse_version
from kvern.plan.weights import Weights, weights_of
from kvern.spec.budget import format_size

SHORT = 4096
"""Tokens of the request that a change must make room for when no length is asked."""


def plan(request: PlanRequest) -> Plan:
    """Answers one request.

    Raises:
        UsageError: something needed is missing, unknown or contradictory.
        CapacityError: the weights and the reserve leave nothing for KV; the smallest change that
            would fit is named.
    """
    engine = load_engine(request.engine)
    weights = weights_of(request)
    budgets, steps, notes = _budgets(request, engine, weights)
    allocation = engine.allocate(request, budgets)
    per_rank = _rank_plans(request, budgets, allocation)
    blocks = [rank.num_blocks for rank in per_rank]
    answer = Plan(
        request=request,
        engine=engine.name,
        engine_version=parse_version(request.engine_version).text,
        per_rank=per_rank,
        tightest_rank=blocks.index(min(blocks)),
        allocation=allocation,
        context=request.asked_context,
        explanation=(*steps, *allocation.steps),
        assumptions=(*notes, *allocation.assumptions),
    )
    return answer.with_warnings(warnings_for(answer))


def _rank_plans(
    request: PlanRequest, budgets: tuple[Budget, ...], allocation: Allocation
) -> tuple[RankPlan, ...]:
    stages = stage_layers(request)
    return tuple(
        RankPlan(
            rank=budget.rank,
            stage=budget.stage,
            num_layers=len(stages[budget.stage]),
            weights_bytes=budget.weights_bytes,
            reserve_bytes=budget.reserve_bytes,
            kv_budget_bytes=allocation.used_bytes[i]
            if budget.kv_bytes is None
            else budget.kv_bytes,
            num_blocks=allocation.num_blocks[i],
            kv_used_bytes=allocation.used_bytes[i],
            block_bytes=allocation.block_bytes[i],
        )
        for i, budget in enumerate(budgets)
    )


def _budgets(
    request: PlanRequest, engine: Engine, weights: Weights | None, *, advise: bool = True
) -> tuple[tuple[Budget, ...], list[Step], list[str]]:
    """Memory per rank, the steps that led there, and what was assumed."""
    ranks = [(stage, rank) for stage in range(request.pp) for rank in range(request.tp)]
    if request.kv_memory is not None:
        budgets = tuple(
            Budget(i, stage, _stage_weights(weights, stage), 0, request.kv_memory)
            for i, (stage, _) in enumerate(ranks)
        )
        text = f"{request.kv_memory:,} B"
        return budgets, [Step("bytes for KV", "given", text)], []
    total = request.total_memory
    if total is None:
        if request.num_blocks is None and request.num_tokens is None and engine.name != "llama.cpp":
            raise UsageError(
                "how much memory is there? give --device NAME, --memory SIZE, or the bytes for "
                "KV alone with --kv-memory SIZE"
            )
        budgets = tuple(
            Budget(i, stage, _stage_weights(weights, stage), 0, None)
            for i, (stage, _) in enumerate(ranks)
        )
        return budgets, [], []
    stages = [stage for stage, _ in ranks]
    return _memory_budgets(request, engine, weights, total, stages, advise=advise)


def _stage_weights(weights: Weights | None, stage: int) -> int | None:
    return None if weights is None else weights.per_stage[stage]


def _memory_budgets(
    request: PlanRequest,
    engine: Engine,
    weights: Weights | None,
    total: int,
    stages: list[int],
    *,
    advise: bool,
) -> tuple[tuple[Budget, ...], list[Step], list[str]]:
    if weights is None:
        model = request.model
        missing = ", ".join(model.missing_fields)
        why = (
            f"the configuration of {model.name} lacks {missing}, so its weights cannot be counted"
            if missing
            else f"the weights of the {model.family} family are not counted from a configuration"
        )
        raise UsageError(
            f"{why}: give --weights SIZE, or the bytes for KV alone with --kv-memory SIZE"
        )
    share = request.utilization or engine.default_utilization(request)
    reserve, why = (
        (request.reserve, "given") if request.reserve is not None else engine.reserve(request)
    )
    notes: list[str] = []
    if request.reserve is None:
        notes.append(f"reserve of {format_size(reserve)}: {why} (--reserve sets it)")
    if request.utilization is None and share < 1:
        notes.append(f"the engine plans with {share:g} of the memory (--utilization sets it)")
    budgets = tuple(
        Budget(
            rank=i,
            stage=stage,
            weights_bytes=weights.per_stage[stage],
            reserve_bytes=reserve,
            kv_bytes=int(total * share) - weights.per_stage[stage] - reserve,
            total_bytes=total,
            utilization=share,
        )
        for i, stage in enumerate(stages)
    )
    worst = min(budgets, key=lambda b: b.kv_bytes or 0)
    if (worst.kv_bytes or 0) <= 0:
        raise CapacityError(_too_small(request, worst, share, total) if advise else "too small")
    return budgets, _memory_steps(request, weights, worst, why), notes


def _memory_steps(request: PlanRequest, weights: Weights, worst: Budget, why: str) -> list[Step]:
    """From the device's memory to the bytes for KV on the tightest rank."""
    total, share = format_size(worst.total_bytes or 0), worst.utilization or 1.0
    own = format_size(worst.weights_bytes or 0)
    reserve = format_size(worst.reserve_bytes)
    device = f"{request.device.name}: " if request.device and request.memory is None else ""
    split = f" over {request.num_ranks} ranks" if request.num_ranks > 1 else ""
    return [
        Step("memory of one device", f"{device}as reported", total),
        Step("weights", f"{weights.basis}{split}", f"{own} a rank"),
        Step("reserve", why, reserve),
        Step(
            "bytes for KV on the tightest rank",
            f"{total} × {share:g} - {own} - {reserve}",
            f"{worst.kv_bytes:,} B = {format_size(worst.kv_bytes or 0)}",
        ),
    ]


def _too_small(request: PlanRequest, worst: Budget, share: float, total: int) -> str:
    change = smallest_change(request, _fits)
    return (
        f"{request.model.name} does not fit: a rank needs {format_size(worst.weights_bytes or 0)} "
        f"for weights and {format_size(worst.reserve_bytes)} for activations and runtime, and "
        f"{share:g} of {format_size(total)} is {format_size(int(total * share))}, "
        f"{format_size(-(worst.kv_bytes or 0))} too little: {change}"
    )


def _fits(request: PlanRequest) -> bool:
    """Whether one request of the asked length fits, or a short one if no length is asked."""
    context = request.context or min(request.model.max_model_len or SHORT, SHORT)
    try:
        budgets = _budgets(request, load_engine(request.engine), weights_of(request), advise=False)[
            0
        ]
        asked = replace(request, context=context)
        return load_engine(request.engine).allocate(asked, budgets).fits
    except KvernError:
        return False
