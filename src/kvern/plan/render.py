"""The answer as a person wants to read it: what fits, which rank decides, what it costs, why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from kvern.plan.advice import not_yet_stored
from kvern.plan.explain import Matrix, explained, formatted_model, matrix_for, shown_format
from kvern.plan.lengths import Concurrency, Lengths, Utilisation
from kvern.plan.need import Option
from kvern.plan.prefixes import PrefixPlan
from kvern.plan.result import Plan, Step
from kvern.plan.roofline import DecodeBound, OffloadBound
from kvern.spec.budget import format_size

LINE = 98


def table(rows: Sequence[Sequence[str]], indent: str = "  ", left: int = 1) -> list[str]:
    """Aligned columns: the first `left` ones to the left, a rule under row 0."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
        if number == 0:
            lines.append(indent + "  ".join("─" * width for width in widths))
    return lines


def facts(pairs: Iterable[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Names and values in two columns."""
    kept = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return [f"{indent}{name.ljust(width)}  {value}" for name, value in kept]


def notes(title: str, texts: Sequence[str]) -> list[str]:
    """A headed list of sentences, wrapped."""
    if not texts:
        return []
    lines = ["", title]
    for text in texts:
        first, *rest = wrap(text, LINE - 4) or [""]
        lines.append(f"  - {first}")
        lines += [f"    {line}" for line in rest]
    return lines


def heading(answer: Plan) -> str:
    """Model, engine, devices and degrees in one line."""
    request = answer.request
    parts = [request.model.name, f"{answer.engine} {answer.engine_version}"]
    if request.device is not None:
        devices = request.num_ranks * request.dp
        parts.append((f"{devices} × " if devices > 1 else "") + request.device.name)
    degrees = [
        f"{name} {degree}"
        for name, degree in (("TP", request.tp), ("PP", request.pp), ("DP", request.dp),
                             ("DCP", request.dcp))
        if degree > 1
    ]  # fmt: skip
    if degrees:
        parts.append(", ".join(degrees))
    return " · ".join(parts)


def summary(answer: Plan) -> list[str]:
    """The answer without its derivation."""
    a = answer.allocation
    verdict = "fits" if a.fits else "does not fit"
    kind = "" if answer.request.context else ", the model's own limit"
    each = " per replica" if answer.request.dp > 1 else ""
    is_llama = answer.engine == "llama.cpp"
    per_block = format_size(a.block_bytes[answer.tightest_rank])
    lines = [heading(answer), ""]
    lines += facts(
        [
            ("Asked context", f"{answer.context:,} tokens{kind}, prompt and output: {verdict}"),
            ("Capacity", f"{a.capacity_tokens:,} tokens{each}"),
            ("Requests at once", _at_once(answer) + each),
            ("Longest request", f"{answer.max_model_len:,} tokens"),
            ("KV of one request", f"{format_size(a.bytes_for_context)}{_two_parts(answer)}"),
            ("Pool", "" if is_llama else f"{answer.num_blocks:,} blocks × {per_block} of "
                     f"{a.block_size:,} tokens"),
        ]
    )  # fmt: skip
    lines += ["", "Memory of each rank", *rank_table(answer)]
    scope = "all ranks together" if is_llama else "one rank"
    if answer.request.pp > 1 and not is_llama:
        scope = f"rank {answer.tightest_rank}"
    lines += ["", f"Pools of {scope}", *pool_table(answer)]
    if len(a.groups) > 1 and not is_llama:
        lines += [
            "",
            "Groups of layers, and the blocks that one request takes",
            *group_table(answer),
        ]
    return lines


def _two_parts(answer: Plan) -> str:
    fixed, per_token = answer.request_cost
    if fixed < 2**20:
        return f", {per_token:,.6g} B per token"
    return f": {format_size(fixed)} fixed + {per_token:,.6g} B per token"


def _at_once(answer: Plan) -> str:
    a = answer.allocation
    if answer.engine != "llama.cpp":
        return f"{int(a.max_concurrency * 100) / 100:,.2f} of that length"
    slots = answer.request.slots or 1
    if a.extras["streams"] == 1:
        return f"{slots:,}, sharing {a.capacity_tokens:,} tokens"
    return f"{slots:,} of {a.capacity_tokens // slots:,} tokens each: the context is split"


def rank_table(answer: Plan) -> list[str]:
    """One row per rank; equal ranks of a stage are one row."""
    rows: list[tuple[str, ...]] = [
        ("rank", "layers", "weights", "reserve", "KV budget", "blocks", "unused", "")
    ]
    seen: dict[tuple[object, ...], list[int]] = {}
    for rank in answer.per_rank:
        key = (rank.stage, rank.weights_bytes, rank.kv_budget_bytes, rank.num_blocks)
        seen.setdefault(key, []).append(rank.rank)
    if len(seen) == 1:
        rows = [rows[0][:-1]]
    for numbers in seen.values():
        rank = answer.per_rank[numbers[0]]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append(
            (
                name,
                str(rank.num_layers),
                "not known" if rank.weights_bytes is None else format_size(rank.weights_bytes),
                format_size(rank.reserve_bytes),
                format_size(rank.kv_budget_bytes),
                f"{rank.num_blocks:,}",
                format_size(max(rank.unused_bytes, 0)),
                "tightest" if answer.tightest_rank in numbers else "",
            )[: len(rows[0])]
        )
    return table(rows)


def pool_table(answer: Plan) -> list[str]:
    """The allocations as the engine makes them."""
    rows = [("pool", "layers", "cells", "keys", "values", "state", "bytes")]
    for pool in answer.allocation.pools:
        rows.append(
            (
                pool.name,
                str(pool.layers),
                f"{pool.cells:,}",
                format_size(pool.k_bytes) if pool.k_bytes else "",
                format_size(pool.v_bytes) if pool.v_bytes else "",
                format_size(pool.state_bytes) if pool.state_bytes else "",
                format_size(pool.bytes),
            )
        )
    return table(rows)


def group_table(answer: Plan) -> list[str]:
    """What one request takes, group by group; equal groups are one row."""
    rows = [("group", "layers", "block", "page of a layer", "waste", "blocks of a request")]
    counted: dict[tuple[object, ...], int] = {}
    groups = answer.allocation.groups
    for g in groups:
        key = (g.kind, g.block_size, g.page_bytes, g.page_waste_bytes, g.blocks_per_request)
        counted[key] = counted.get(key, 0) + 1
    shown: set[tuple[object, ...]] = set()
    for g in groups:
        key = (g.kind, g.block_size, g.page_bytes, g.page_waste_bytes, g.blocks_per_request)
        if key in shown:
            continue
        shown.add(key)
        times = f"{counted[key]} × " if counted[key] > 1 else ""
        padding = f" + {g.padding_layers} padding" if g.padding_layers else ""
        waste = f"{g.page_waste_bytes / g.page_bytes:.2%}" if g.page_bytes else ""
        rows.append(
            (
                f"{times}{g.kind}",
                f"{g.num_layers}{padding}",
                f"{g.block_size:,}",
                format_size(g.page_bytes),
                waste if g.page_waste_bytes else "",
                f"{times}{g.blocks_per_request:,}",
            )
        )
    return table(rows)


def step_lines(steps: Iterable[Step]) -> list[str]:
    """Numbered steps: what, the formula with numbers, the result."""
    lines: list[str] = []
    for number, step in enumerate(steps, 1):
        lines.append(f"  {number:>2}. {step.title}")
        formula = wrap(step.formula, LINE - 8, break_long_words=False) or [""]
        lines += [f"        {part}" for part in formula]
        lines.append(f"      = {step.result}")
    return lines


def explanation(answer: Plan, batch: int | None = None) -> list[str]:
    """The derivation and the KV matrix, with a column for `batch`."""
    lines = ["", "How the numbers come about", *step_lines(explained(answer))]
    model = formatted_model(answer)
    name = shown_format(answer)
    lines += [
        "",
        f"KV bytes by length and batch (whole model, one copy, {name}, no block rounding)",
    ]
    return lines + matrix_lines(matrix_for(model, answer.context, batch))


def matrix_lines(matrix: Matrix) -> list[str]:
    """The KV matrix as a table."""
    rows = [("tokens", *(f"batch {batch}" for batch in matrix.batches))]
    for length, sizes in zip(matrix.lengths, matrix.bytes, strict=True):
        rows.append((f"{length:,}", *(format_size(size) for size in sizes)))
    return table(rows)


def length_lines(lengths: Lengths, concurrency: Concurrency, shares: Utilisation) -> list[str]:
    """What a distribution of lengths says."""
    rows = [("requests at once", "")]
    rows += [(f"with {p:.0%} probability", f"{n:,}") for p, n in concurrency.fits.items()]
    rows.append((f"estimate from the mean of {concurrency.mean_tokens:,.0f} tokens",
                 f"{concurrency.mean_based:,}"))  # fmt: skip
    lines = [
        "",
        f"Lengths of {lengths.source} ({lengths.layout}, {len(lengths.prompts):,} requests; "
        f"{concurrency.trials:,} trials, seed {concurrency.seed})",
        *table(rows),
    ]
    error = concurrency.mean_error
    if error > 0:
        lines.append(f"  The mean-based estimate is {error:,} requests above what fits with 99 %.")
    elif error < 0:
        lines.append(f"  The mean-based estimate is {-error:,} requests below what fits with 99 %.")
    if concurrency.too_long:
        lines.append(
            f"  {concurrency.too_long:.2%} of the requests fit the pool not even alone; left out."
        )
    if lengths.skipped:
        lines.append(f"  {lengths.skipped:,} rows without lengths were skipped.")
    rows = [
        ("way of reserving memory", "holds something"),
        (f"the maximum ({shares.max_len:,} tokens)", f"{shares.by_maximum:.1%}"),
        ("a power of two", f"{shares.by_power_of_two:.1%}"),
        ("the exact final length", f"{shares.by_exact_length:.1%}"),
        ("pages", f"{shares.paging:.1%}"),
    ]
    return [*lines, "", "Memory that holds something, averaged over requests' lives", *table(rows)]


def prefix_lines(prefix: PrefixPlan) -> list[str]:
    """What shared and retained prefixes do to the count of requests."""
    pairs: list[tuple[str, str]] = []
    if prefix.shared_tokens:
        pairs += [
            ("Shared prefix", f"{prefix.shared_tokens:,} tokens: {prefix.shared_blocks:,} blocks, "
                              f"stored once instead of once per request"),
            ("Own blocks of a request", f"{prefix.own_blocks:,}"),
        ]  # fmt: skip
    if prefix.retained_count:
        pairs.append(
            ("Retained prefixes", f"{prefix.retained_count:,} × {prefix.retained_tokens:,} tokens: "
                                  f"{prefix.retained_blocks:,} blocks held while idle")
        )  # fmt: skip
    pairs.append(("Requests at once", f"{prefix.requests:,} (without either: "
                                      f"{prefix.requests_without:,})"))  # fmt: skip
    return ["", "Prefixes", *facts(pairs)]


def bound_lines(bound: DecodeBound, offload: OffloadBound, prefill: float) -> list[str]:
    """Time bounds: decode, prefill, offload."""
    cache = ""
    if bound.cache_bytes is not None:
        verdict = "fits" if bound.kv_fits_on_chip else "does not fit"
        cache = (
            f"{bound.cache_bytes / 1e6:g} MB against {format_size(bound.kv_bytes)} of KV per step: "
            f"{verdict}"
        )
    turning = (
        f"batch {bound.turning_batch:,}"
        if bound.turning_batch is not None
        else "at no batch: the cache that is read grows with it"
    )
    lines = ["", "Time bounds (what bandwidth and arithmetic allow at best: bounds, not promises)"]
    lines += facts(
        [
            (
                "Decode step",
                f"batch {bound.batch:,} of {bound.context:,} tokens: {_ms(bound.step_s)}, "
                f"{bound.tokens_per_s:,.0f} tokens/s, bound by {bound.bound_by}",
            ),
            (
                "  by bandwidth",
                f"({format_size(bound.weight_bytes)} weights + {format_size(bound.kv_bytes)} KV) / "
                f"{bound.bandwidth / 1e9:,.0f} GB/s = {_ms(bound.memory_s)}",
            ),
            (
                "  by arithmetic",
                f"{bound.flops / 1e12:,.3f} TFLOP / {bound.peak_flops / 1e12:,.0f} TFLOP/s = "
                f"{_ms(bound.compute_s)}",
            ),
            ("Compute-bound from", turning),
            ("Growth", f"an output token adds {format_size(bound.token_bytes)} to each request"),
            ("On-chip cache", cache),
            ("Prefill", f"{offload.num_tokens:,} tokens alone: {_ms(prefill)}"),
        ]
    )
    for source, seconds in offload.load_s.items():
        start = offload.faster_from[source]
        when = (
            "recomputing is faster at every length"
            if start is None
            else "loading is faster at every length"
            if start == 0
            else f"loading is faster from {start:,} tokens on"
        )
        name = {"ram": "Load from RAM", "ssd": "Load from SSD"}[source]
        lines += facts([(name.ljust(18), f"{format_size(offload.kv_bytes)}: {_ms(seconds)} against "
                         f"{_ms(offload.recompute_s)} to recompute; {when}")])  # fmt: skip
    return lines


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.3g} ms"


def option_lines(options: Sequence[Option], need: str, limit: int = 12) -> list[str]:
    """Set-ups that serve a need, smallest first."""
    if not options:
        return [f"Nothing in the catalogue serves {need}: raise --tp or narrow --kv-format."]
    rows = [("device", "TP", "KV format", "memory in all", "requests", "longest")]
    for option in options[:limit]:
        rows.append(
            (
                option.device.name,
                str(option.tp),
                option.kv_format,
                format_size(option.total_memory),
                f"{option.concurrency:,.1f}",
                f"{option.plan.max_model_len:,}",
            )
        )
    first = options[0]
    lines = [
        f"Serves {need}, smallest first: {first.device.name}"
        f"{f', TP {first.tp}' if first.tp > 1 else ''}, KV in {first.kv_format}",
        "",
        *table(rows),
    ]
    if len(options) > limit:
        lines.append(f"  and {len(options) - limit} larger ones")
    notes = {
        not_yet_stored(o.plan.engine, o.kv_format, o.plan.request.model.num_layers)
        for o in options[:limit]
    } - {None}
    if notes:
        lines += ["", *(f"  - {note}" for note in sorted(map(str, notes)))]
    return lines
