"""SGLang: slots per token instead of pages, a window pool of fixed ratio, a pool of states.

    tokens        = bytes for KV // bytes per token, rounded down to whole pages
    buffers hold    tokens + page_size slots, a state pool slots + 1
    window pool   = 0.8 of the full pool, whatever the window
It prints GB and means GiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvern.errors import UsageError
from kvern.plan.engines import Engine
from kvern.plan.engines.base import (
    DTYPE_BYTES,
    activation_reserve,
    canonical_format,
    cdiv,
    largest_fitting,
    num_elements,
    serving_dtype,
    state_bytes,
)
from kvern.plan.engines.sglang_compressed import allocate_compressed, is_compressed
from kvern.plan.engines.sglang_rules import (
    CHUNKED_PREFILL_TOKENS,
    DENSE_LATENT_BACKENDS,
    FORMAT_BYTES,
    HYBRID_WINDOW,
    INDEX_IN_PRINT,
    INDEX_PAGE,
    INDEX_SCALE_GROUP,
    RUNTIME_RESERVE,
    STATE_RATIO,
    UTILIZATION,
    WINDOW_RATIO,
)
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget, Group, Pool, Step
from kvern.plan.shards import RankCache, has_index, rank_caches, stage_layers, stage_of
from kvern.plan.versions import EngineVersion, parse_version, rule_at
from kvern.spec.budget import format_size
from kvern.spec.content import Index, Latent, State, StatePart
from kvern.spec.reach import Chunk, Window


@dataclass(frozen=True, slots=True)
class _Cells:
    """Bytes per token slot of one rank, by pool."""

    full_k: Fraction = Fraction()
    full_v: Fraction = Fraction()
    window_k: Fraction = Fraction()
    window_v: Fraction = Fraction()
    index: Fraction = Fraction()
    full_layers: int = 0
    window_layers: int = 0
    is_latent: bool = False
    ratio: Fraction = WINDOW_RATIO

    @property
    def full(self) -> Fraction:
        return self.full_k + self.full_v + self.index

    @property
    def window(self) -> Fraction:
        return self.window_k + self.window_v

    def per_full_token(self) -> Fraction:
        """Bytes per token of the full pool, the window pool's share included."""
        return self.full + self.ratio * self.window if self.full else self.window


def _latent_bytes(content: Latent, request: PlanRequest, kv_format: str, sparse: bool) -> int:
    if kv_format == "fp8" and sparse and request.backend not in DENSE_LATENT_BACKENDS:
        scales = cdiv(content.latent_dim, INDEX_SCALE_GROUP) * 4
        return content.latent_dim + scales + 2 * content.rope_dim
    return int(num_elements(content) * FORMAT_BYTES[kv_format])


def _format(request: PlanRequest) -> str:
    kv_format = canonical_format(request.kv_format, serving_dtype(request.model))
    if kv_format not in FORMAT_BYTES:
        raise UsageError(
            f"SGLang stores no KV format {kv_format!r}: choose auto, {', '.join(FORMAT_BYTES)}"
        )
    return kv_format


def _cells(request: PlanRequest, caches: tuple[RankCache, ...]) -> _Cells:
    kv_format = _format(request)
    sparse = has_index(caches)
    prefixes = rule_at(HYBRID_WINDOW, parse_version(request.engine_version))
    known = request.model.architecture.startswith(prefixes) if prefixes else False
    hybrid = known if request.hybrid is None else request.hybrid
    sums = dict.fromkeys(("full_k", "full_v", "window_k", "window_v", "index"), Fraction())
    layers: dict[str, set[int]] = {"full": set(), "window": set()}
    is_latent = False
    for cache in caches:
        content = cache.content
        if content is None or isinstance(content, State):
            continue
        if isinstance(content, Index):
            scales = cdiv(content.dim, INDEX_SCALE_GROUP) * 4
            sums["index"] += Fraction(content.dim + scales, cache.stride)
            continue
        local = isinstance(cache.reach, Window | Chunk)
        kind = "window" if local and hybrid else "full"
        layers[kind].add(cache.layer)
        if isinstance(content, Latent):
            is_latent = True
            stored = _latent_bytes(content, request, kv_format, sparse)
            sums[f"{kind}_k"] += Fraction(stored, cache.stride)
        else:
            element = FORMAT_BYTES[kv_format]
            sums[f"{kind}_k"] += int(content.num_kv_heads * content.key_dim * element)
            sums[f"{kind}_v"] += int(content.num_kv_heads * content.value_dim * element)
    return _Cells(
        **sums,
        full_layers=len(layers["full"]),
        window_layers=len(layers["window"]),
        is_latent=is_latent,
        ratio=_window_ratio(request),
    )


def _window_ratio(request: PlanRequest) -> Fraction:
    return WINDOW_RATIO if request.window_ratio is None else Fraction(str(request.window_ratio))


def _states(request: PlanRequest, caches: tuple[RankCache, ...]) -> list[State]:
    """States as SGLang stores them: convolution in the model's dtype, the rest in fp32."""
    dtype = canonical_format(request.state_dtype, None) if request.state_dtype else "fp32"
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--state-dtype {dtype!r} does not exist: choose fp32, bf16 or fp16")
    model_dtype = serving_dtype(request.model)
    states: list[State] = []
    for cache in caches:
        if isinstance(cache.content, State):
            parts = tuple(
                StatePart(p.name, p.shape, model_dtype if p.name == "conv" else dtype)
                for p in cache.content.parts
            )
            states.append(State(parts))
    return states


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's cells and states."""

    cells: _Cells
    states: tuple[State, ...]

    @property
    def slot_bytes(self) -> int:
        return sum(state.fixed_bytes for state in self.states)


def _slots(request: PlanRequest, rank: _Rank, kv_bytes: int | None) -> int:
    """State slots: given, else such that states take 0.9 of what KV takes."""
    if not rank.states:
        return 0
    if request.slots is not None:
        return request.slots
    if kv_bytes is None:
        return request.max_num_seqs or 1
    share = STATE_RATIO / (1 + STATE_RATIO)
    return int(kv_bytes * share) // rank.slot_bytes


def _states_come_on_top(request: PlanRequest) -> bool:
    """Whether bytes for KV are for tokens alone: both they and the slots were given."""
    return request.kv_memory is not None and request.slots is not None


def _tokens(request: PlanRequest, rank: _Rank, kv_bytes: int | None, page: int) -> int:
    """Tokens of the full pool (of the window pool, if that is all there is); 0 without either."""
    if request.num_tokens is not None:
        return request.num_tokens // page * page
    if request.num_blocks is not None:
        return request.num_blocks * page
    left = kv_bytes or 0
    if not _states_come_on_top(request):
        left -= _slots(request, rank, kv_bytes) * rank.slot_bytes
    per_token = rank.cells.per_full_token()
    return max(int(left / per_token), 0) // page * page if per_token else 0


def _page(request: PlanRequest, caches: tuple[RankCache, ...]) -> int:
    if request.block_size is not None:
        return request.block_size
    return INDEX_PAGE if has_index(caches) else 1


def allocate(request: PlanRequest, budgets: tuple[Budget, ...]) -> Allocation:
    """Pools and capacity of one replica; decode context parallelism is refused."""
    if request.dcp > 1:
        raise UsageError(f"--dcp {request.dcp}: no rule of SGLang's is known for it: choose --dp")
    version = parse_version(request.engine_version)
    caches = rank_caches(request)
    if is_compressed(caches):
        return allocate_compressed(request, budgets)
    stages = stage_layers(request)
    ranks: list[_Rank] = []
    for budget in budgets:
        own = tuple(c for c in caches if stage_of(c.layer, stages) == budget.stage)
        ranks.append(_Rank(_cells(request, own), tuple(_states(request, own))))
    page = _page(request, caches)
    tokens = tuple(
        _tokens(request, rank, b.kv_bytes, page) for rank, b in zip(ranks, budgets, strict=True)
    )
    # a stage of recurrent layers alone has no tokens to count
    pool = min((t for t, r in zip(tokens, ranks, strict=True) if _cell_bytes(r.cells)), default=0)
    tightest = tokens.index(pool)
    tokens = tuple(t if _cell_bytes(r.cells) else pool for t, r in zip(tokens, ranks, strict=True))
    slots = _slots(request, ranks[tightest], budgets[tightest].kv_bytes)
    context = request.asked_context
    has_window = bool(ranks[tightest].cells.window and ranks[tightest].cells.full)
    window_tokens = int(pool * _window_ratio(request)) // page * page if has_window else 0
    needed = [_request_bytes(rank, context, page) for rank in ranks]
    fits = pool >= cdiv(context, page) * page and (not ranks[tightest].states or slots > 0)
    pools = _pools(ranks[tightest], pool, window_tokens, slots, page, version)
    concurrency = pool / context
    if slots and ranks[tightest].states:
        concurrency = min(concurrency, float(slots))
    upper = max(context, request.model.max_model_len or context)
    longest = largest_fitting(lambda n: cdiv(n, page) * page <= pool, upper)
    return Allocation(
        block_size=page,
        block_bytes=tuple(max(int(page * _cell_bytes(r.cells)), 1) for r in ranks),
        num_blocks=tuple(t // page for t in tokens),
        capacity_tokens=pool,
        max_concurrency=concurrency,
        longest_context=longest,
        bytes_for_context=max(needed),
        fits=fits,
        pools=pools,
        groups=_groups(pools, context, page),
        blocks_per_request=cdiv(context, page),
        steps=_steps(request, ranks[tightest], budgets[tightest], pool, slots, page, pools),
        used_bytes=tuple(_used_bytes(r, pool, window_tokens, slots, page) for r in ranks),
        request_bytes=lambda n: max(_request_bytes(rank, n, page) for rank in ranks),
        usable_blocks=pool // page,
        blocks_of=lambda num_tokens: cdiv(num_tokens, page),
        shared_blocks_of=lambda num_tokens: num_tokens // page,
        assumptions=_assumptions(request, ranks[tightest], has_window),
        extras={"window_tokens": window_tokens, "state_slots": slots},
    )


def _cell_bytes(cells: _Cells) -> Fraction:
    return cells.full or cells.window


def _request_bytes(rank: _Rank, context: int, page: int) -> int:
    tokens = cdiv(context, page) * page
    return int(tokens * rank.cells.per_full_token()) + rank.slot_bytes


def _used_bytes(rank: _Rank, pool: int, window: int, slots: int, page: int) -> int:
    full = (pool + page) * rank.cells.full
    windows = ((window or pool) + page) * rank.cells.window
    return int(full + windows) + (slots + 1) * rank.slot_bytes


def _pools(
    rank: _Rank, pool: int, window: int, slots: int, page: int, version: EngineVersion
) -> tuple[Pool, ...]:
    cells = rank.cells
    pools: list[Pool] = []
    slot_count = pool + page
    if cells.full:
        index = int(slot_count * cells.index)
        printed = index if rule_at(INDEX_IN_PRINT, version) or version.is_pull_request else 0
        parts = {"index": index} if index else {}
        if index and not printed:
            parts["not_printed"] = index
        pools.append(
            Pool(
                name="full",
                layers=cells.full_layers,
                cells=pool,
                k_bytes=int(slot_count * cells.full_k) + printed,
                v_bytes=int(slot_count * cells.full_v),
                parts=parts,
            )
        )
    if cells.window:
        count = (window if cells.full else pool) + page  # one page of slots beyond the tokens
        pools.append(
            Pool(
                name="window",
                layers=cells.window_layers,
                cells=count - page,
                k_bytes=int(count * cells.window_k),
                v_bytes=int(count * cells.window_v),
            )
        )
    if rank.states:
        conv = sum(state_bytes(state, "conv") for state in rank.states) * (slots + 1)
        total = rank.slot_bytes * (slots + 1)
        pools.append(
            Pool(
                name="state",
                layers=len(rank.states),
                cells=slots,
                state_bytes=total,
                parts={"conv": conv, "ssm": total - conv},
            )
        )
    return tuple(pools)


def _groups(pools: tuple[Pool, ...], context: int, page: int) -> tuple[Group, ...]:
    return tuple(
        Group(
            name=p.name,
            kind=p.name,
            num_layers=p.layers,
            block_size=page,
            page_bytes=p.bytes // max(p.cells * p.layers, 1) * (1 if p.name == "state" else page),
            blocks_per_request=1 if p.name == "state" else cdiv(context, page),
        )
        for p in pools
    )


def _steps(
    request: PlanRequest,
    rank: _Rank,
    budget: Budget,
    pool: int,
    slots: int,
    page: int,
    pools: tuple[Pool, ...],
) -> tuple[Step, ...]:
    cells = rank.cells
    steps = []
    terms = []
    if cells.full:
        terms.append(f"{cells.full_layers} full layers: {float(cells.full):,.6g} B")
    if cells.window:
        ratio = f"{float(cells.ratio):g} × " if cells.full else ""
        terms.append(f"{cells.window_layers} window layers: {ratio}{float(cells.window):,.6g} B")
    steps.append(
        Step("bytes per token", " + ".join(terms), f"{float(cells.per_full_token()):,.0f} B")
    )
    if rank.states:
        steps.append(
            Step(
                "state pool",
                f"({slots:,} slots + 1) × {len(rank.states)} layers, {rank.slot_bytes:,} B a slot",
                format_size((slots + 1) * rank.slot_bytes),
            )
        )
    given = request.num_tokens is not None or request.num_blocks is not None
    if not given and budget.kv_bytes is not None:
        left = budget.kv_bytes
        if not _states_come_on_top(request):
            left -= slots * rank.slot_bytes
        steps.append(
            Step(
                "tokens",
                f"{left:,} B // {float(cells.per_full_token()):,.0f} B, in pages of {page}",
                f"{pool:,}",
            )
        )
    for p in pools:
        if p.name != "state":
            formula = f"({p.cells:,} tokens + {page}) × {p.bytes // (p.cells + page):,} B"
            steps.append(Step(f"{p.name} pool", formula, f"{p.bytes / 2**30:.2f} GiB"))
    return tuple(steps)


def _assumptions(request: PlanRequest, rank: _Rank, has_window: bool) -> tuple[str, ...]:
    notes = ["SGLang prints these sizes as GB; they are GiB"]
    if has_window and request.window_ratio is None:
        notes.append(
            f"the window pool is {float(WINDOW_RATIO):g} of the full pool, whatever the window "
            "(--window-ratio sets it)"
        )
    if rank.states and _states_come_on_top(request):
        notes.append("--kv-memory is for tokens; the states of --slots come on top")
    if rank.states and request.slots is None:
        notes.append(f"states take {STATE_RATIO} of what KV takes (--slots sets their number)")
    return tuple(notes)


def _utilization(_request: PlanRequest) -> float:
    return UTILIZATION


def _reserve(request: PlanRequest) -> tuple[int, str]:
    # mem_fraction_static covers weights and KV; activations live in what it leaves out
    if request.utilization is not None or request.device is not None or request.memory is not None:
        return 0, "activations live outside mem_fraction_static"
    tokens = request.max_batched_tokens or CHUNKED_PREFILL_TOKENS
    return activation_reserve(request, tokens, 256, RUNTIME_RESERVE), "activations and runtime"


ENGINE = Engine("sglang", allocate, _utilization, _reserve)
