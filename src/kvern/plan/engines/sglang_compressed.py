"""SGLang's pools for attention over compressed entries (DeepSeek-V4).

    a full token costs   entry / stride in each compressing layer, its index keys,
                         and ratio × (entry in every layer + its compressors' open states)
    windows have ratio × full tokens; each stride its own pool of full tokens // stride entries
A compressor that does not overlap keeps its open state per request, in later versions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from kvern.errors import UsageError
from kvern.plan.engines import sglang_rules as rules_data
from kvern.plan.engines.base import canonical_format, cdiv, largest_fitting, round_up
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Group, Pool, Step
from kvern.plan.shards import RankCache, rank_caches, stage_layers, stage_of
from kvern.plan.versions import parse_version, rule_at
from kvern.spec.budget import format_size
from kvern.spec.content import Index, Latent

STATE_BYTES = 4
"""Open states of compressors are fp32: what was summed and its weight."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """Bytes of one rank: per full token, by pool, and for each request."""

    entry: int
    layers: Counter[int]
    index: Fraction
    index_layers: int
    states: Fraction
    state_per_request: int
    num_layers: int
    ratio: Fraction
    inflation: Fraction

    @property
    def windows(self) -> Fraction:
        return self.ratio * self.entry * self.num_layers

    @property
    def entries(self) -> Fraction:
        return sum((Fraction(self.entry * n, s) for s, n in self.layers.items()), Fraction())

    @property
    def per_token(self) -> Fraction:
        return (self.windows + self.entries + self.index + self.states) * self.inflation


def is_compressed(caches: tuple[RankCache, ...]) -> bool:
    """Whether layers keep latents of several tokens in one entry."""
    return any(isinstance(c.content, Latent) and c.stride > 1 for c in caches)


def allocate_compressed(request: PlanRequest, budgets: tuple[Budget, ...]) -> Allocation:
    """Pools and capacity of one replica.

    Raises:
        UsageError: another KV format than fp8 was asked for.
    """
    if canonical_format(request.kv_format, "fp8") not in ("fp8", "fp8_ds_mla"):
        raise UsageError(
            f"SGLang keeps compressed attention in fp8, not in {request.kv_format}: leave "
            "--kv-format out"
        )
    caches = tuple(c for c in rank_caches(request) if c.origin == "model")
    stages = stage_layers(request)
    ranks = [
        _rank(request, tuple(c for c in caches if stage_of(c.layer, stages) == b.stage))
        for b in budgets
    ]
    page = request.block_size or rules_data.COMPRESSED_PAGE
    running = max((request.max_num_seqs or rules_data.COMPRESSED_REQUESTS) // request.dp, 1)
    fixed = [_fixed_bytes(rank, running) for rank in ranks]
    tokens = [
        _tokens(request, rank, b, held, page)
        for rank, b, held in zip(ranks, budgets, fixed, strict=True)
    ]
    pool = min(tokens)
    tightest = tokens.index(pool)
    rank, context = ranks[tightest], request.asked_context
    pools = _pools(rank, pool, page, fixed[tightest])

    def request_bytes(num_tokens: int) -> int:
        rounded = round_up(num_tokens, page)
        return max(int(rounded * r.per_token) + r.state_per_request for r in ranks)

    upper = max(context, request.model.max_model_len or context)
    return Allocation(
        block_size=page,
        block_bytes=tuple(max(int(page * r.per_token), 1) for r in ranks),
        num_blocks=tuple(t // page for t in tokens),
        capacity_tokens=pool,
        max_concurrency=min(pool / context, float(running)),
        longest_context=largest_fitting(lambda n: round_up(n, page) <= pool, upper),
        bytes_for_context=request_bytes(context),
        fits=round_up(context, page) <= pool,
        pools=pools,
        groups=tuple(_group(p, context, page) for p in pools),
        blocks_per_request=cdiv(context, page),
        steps=_steps(rank, budgets[tightest], pool, page, fixed[tightest], running),
        used_bytes=tuple(
            int(pool * r.per_token) + held for r, held in zip(ranks, fixed, strict=True)
        ),
        request_bytes=request_bytes,
        usable_blocks=pool // page,
        blocks_of=lambda num_tokens: cdiv(num_tokens, page),
        shared_blocks_of=lambda num_tokens: num_tokens // page,
        assumptions=_assumptions(request, rank, running),
        extras={"bytes_per_full_token": round(float(rank.per_token), 2)},
    )


def _rank(request: PlanRequest, caches: tuple[RankCache, ...]) -> _Rank:
    version = parse_version(request.engine_version)
    by_request = rule_at(rules_data.COMPRESSED_STATES_BY_REQUEST, version)
    drafts = request.speculative_tokens > 0
    ratio = rules_data.COMPRESSED_WINDOW_RATIO
    if request.window_ratio is not None:
        ratio = Fraction(str(request.window_ratio))
    num_layers = len({c.layer for c in caches})
    listed = num_layers if by_request else num_layers + 1  # the draft layer was in the list
    window = max((c.reach.size for c in caches if hasattr(c.reach, "size")), default=1)
    strides: Counter[int] = Counter()
    entry = index_layers = state_per_request = 0
    index, states = Fraction(), Fraction()
    for cache in caches:
        content = cache.content
        if isinstance(content, Latent):
            entry = content.latent_dim + 2 * content.rope_dim + rules_data.COMPRESSED_SCALES
        if cache.stride == 1:
            continue
        overlaps = cache.stride <= rules_data.OVERLAPPING_STRIDE
        ring = cache.stride * (1 + overlaps) * (1 + drafts)
        if isinstance(content, Index):
            scales = cdiv(content.dim, rules_data.INDEX_SCALE_GROUP) * 4
            index += Fraction(content.dim + scales, cache.stride)
            index_layers += 1
            width = content.dim
        elif isinstance(content, Latent):
            strides[cache.stride] += 1
            width = content.latent_dim + content.rope_dim
        else:
            continue
        slot = 2 * (1 + overlaps) * width * STATE_BYTES
        if by_request and not overlaps:
            state_per_request += ring * slot
        else:
            states += ratio * Fraction(ring * slot, window)
    inflate = Fraction(num_layers + 1, num_layers) if by_request and drafts else Fraction(1)
    return _Rank(
        entry=entry,
        layers=strides,
        index=index,
        index_layers=index_layers,
        states=states,
        state_per_request=state_per_request,
        num_layers=listed,
        ratio=ratio,
        inflation=inflate,
    )


def _fixed_bytes(rank: _Rank, running: int) -> int:
    """States of requests: one more than can run, and one more ring for writes to nowhere."""
    return rank.state_per_request * (running + 1 + 2)


def _tokens(request: PlanRequest, rank: _Rank, budget: Budget, fixed: int, page: int) -> int:
    if request.num_tokens is not None:
        return request.num_tokens // page * page
    if request.num_blocks is not None:
        return request.num_blocks * page
    left = max((budget.kv_bytes or 0) - fixed, 0)
    return int(left / rank.per_token) // page * page


def _pools(rank: _Rank, pool: int, page: int, fixed: int) -> tuple[Pool, ...]:
    windows = int(pool * rank.ratio) // page * page
    pools = [
        Pool("window", rank.num_layers, windows, k_bytes=windows * rank.entry * rank.num_layers)
    ]
    for stride, count in sorted(rank.layers.items()):
        entries = pool // stride
        pools.append(Pool(f"1 of {stride}", count, entries, k_bytes=entries * rank.entry * count))
    if rank.index:
        pools.append(Pool("index", rank.index_layers, pool // min(rank.layers),
                          k_bytes=int(pool * rank.index)))  # fmt: skip
    states = int(pool * rank.states) + fixed
    pools.append(Pool("state", sum(rank.layers.values()), windows, state_bytes=states))
    return tuple(pools)


def _group(pool: Pool, context: int, page: int) -> Group:
    return Group(
        name=pool.name,
        kind=pool.name,
        num_layers=pool.layers,
        block_size=page,
        page_bytes=pool.bytes * page // max(pool.cells * pool.layers, 1),
        blocks_per_request=cdiv(context, page),
    )


def _steps(
    rank: _Rank, budget: Budget, pool: int, page: int, fixed: int, running: int
) -> tuple[Step, ...]:
    ratio = f"{float(rank.ratio):g}"
    terms = [f"{ratio} × {rank.num_layers} layers × {rank.entry} B (windows)"]
    terms += [f"{n} layers × {rank.entry} B / {s}" for s, n in sorted(rank.layers.items())]
    terms.append(f"{float(rank.index):,.6g} B (index keys)")
    terms.append(f"{float(rank.states):,.6g} B (open states)")
    text = " + ".join(terms)
    if rank.inflation != 1:
        text = f"({text}) × {rank.inflation} for the draft layer"
    steps = [Step("bytes per full token", text, f"{float(rank.per_token):,.2f} B")]
    if fixed:
        formula = f"({running:,} requests + 3) × {rank.state_per_request:,} B"
        steps.append(Step("open states by request", formula, format_size(fixed)))
    if budget.kv_bytes is not None:
        formula = f"({budget.kv_bytes:,} - {fixed:,}) B // {float(rank.per_token):,.2f} B"
        steps.append(Step("full tokens", f"{formula}, in pages of {page}", f"{pool:,}"))
    return tuple(steps)


def _assumptions(request: PlanRequest, rank: _Rank, running: int) -> tuple[str, ...]:
    notes = ["SGLang prints these sizes as GB; they are GiB"]
    if request.window_ratio is None:
        notes.append(
            f"the window pool is {float(rank.ratio):g} of the full pool (--window-ratio sets it)"
        )
    if rank.state_per_request and request.max_num_seqs is None:
        notes.append(f"{running} requests run at once (--max-num-seqs sets them)")
    return tuple(notes)
