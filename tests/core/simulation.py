"""A pool of pretend memory: what lies in every slot, and whether each query finds what it needs.

A slot holds the fingerprint of the whole prefix up to its token (as keys and values depend on all
of it), so a wrong block, a stale slot, a foreign tenant's content or a changed sealed block is seen
at the first query that needs it. Answers are a function of the prefix alone, so every request has
one right answer whatever else runs.

A narrow group is treated as a mixed one: one layer as computed in the pool, another with open blocks
per seat and sealed blocks in the pool. Its queries must find their own block as computed and every
earlier one sealed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from kvern.core.clock import ManualClock
from kvern.core.config import SchedulerConfig
from kvern.core.plan import (
    Copy,
    CopyOpen,
    RequestFinished,
    RequestStarted,
    SampleFinished,
    StepPlan,
    StepResult,
    TokenChoice,
    TokenEvent,
    Zero,
)
from kvern.core.scheduler import Scheduler
from kvern.core.sequence import Request
from kvern.spec import (
    KV_FORMATS,
    All,
    Chunk,
    Heads,
    KVCacheSpec,
    KVGroup,
    KVPlan,
    Last,
    State,
    StatePart,
    Window,
)
from kvern.spec.regimes import PositionRegimes

PRIME = (1 << 61) - 1
VOCABULARY = 5
NOTHING = -1
NEVER = 1 << 60


def full(block_size=4, kv_format="bf16"):
    return group(All(), block_size, kv_format)


def window(size, block_size=4, sinks=0, kv_format="bf16"):
    return group(Window(size, sinks), block_size, kv_format)


def chunk(size, block_size=4, kv_format="bf16"):
    return group(Chunk(size), block_size, kv_format)


def state(pages=1):
    content = State((StatePart("matrix", (8,), "fp32"),))
    return KVGroup((0,), KVCacheSpec(content, Last()), 4, 1024, pages_per_entry=pages)


def group(reach, block_size, kv_format="bf16"):
    k_codec, v_codec = KV_FORMATS[kv_format]
    spec = KVCacheSpec(Heads(1, 8, 8), reach, k_codec=k_codec, v_codec=v_codec)
    return KVGroup((0,), spec, block_size, 1024)


def kv_plan(groups, num_blocks):
    return KVPlan(tuple(groups), 1024, num_blocks, 0)


def root_of(request: Request, regime: int = 0) -> int:
    """Where the fingerprints of a request start: its tenant, adapter and so on."""
    key = (request.cache_salt, request.adapter, request.position_regime, regime)
    return int.from_bytes(repr(key).encode(), "little") % PRIME


def step_fingerprint(value: int, token: int, media: bytes = b"") -> int:
    extra = int.from_bytes(media, "little") if media else 0
    return ((value + 1) * 1_000_003 + token * 7919 + extra * 104_729 + 11) % PRIME


def prefix_fingerprints(request: Request, tokens: SequenceOf[int], regime: int = 0) -> list[int]:
    value, found = root_of(request, regime), []
    starts = {item.start: item.digest for item in request.media}
    for position, token in enumerate(tokens):
        value = step_fingerprint(value, int(token), starts.get(position, b""))
        found.append(value)
    return found


def choose(value: int, sample_index: int) -> TokenChoice:
    mixed = (value * 6_364_136_223_846_793_005 + sample_index * 1_442_695_040_888_963) % PRIME
    return TokenChoice((mixed >> 20) % VOCABULARY, -1.0 - (mixed % 1000) / 1000)


def candidates(value: int, count: int) -> list[TokenChoice]:
    """The likeliest tokens of a made-up distribution, best first."""
    choices = [
        TokenChoice(token, -0.5 - (step_fingerprint(value, token + 100) % 4096) / 1024)
        for token in range(max(count, VOCABULARY))
    ]
    return sorted(choices, key=lambda choice: (-choice.logprob, choice.token_id))[:count]


def right_answer(
    request: Request,
    max_tokens: int,
    sample_index: int = 0,
    border: int | None = None,
    step: int | None = None,
) -> list[int]:
    tokens, answer = [int(token) for token in request.prompt], []
    regimes = PositionRegimes(NEVER if border is None else border, step)
    regime = regimes.of(len(tokens))
    value = prefix_fingerprints(request, tokens, regime)[-1]
    while len(answer) < max_tokens:
        token = choose(value, sample_index).token_id
        answer.append(token)
        if token in request.stop_token_ids:
            break
        before, regime = regime, regimes.of(len(tokens) + len(answer))
        if regime != before:
            value = prefix_fingerprints(request, [*tokens, *answer], regime)[-1]
        else:
            value = step_fingerprint(value, token)
    return answer


class PretendExecutor:
    """Carries plans out on pretend memory and complains about everything that is wrong."""

    def __init__(self, scheduler: Scheduler, check_writes: bool = True) -> None:
        self.scheduler = scheduler
        num_blocks = scheduler.kv_plan.num_blocks
        largest = max(g.block_size for g in scheduler.kv_plan.groups)
        self.slots = np.full((num_blocks, largest), NOTHING, np.int64)
        self.sealed = np.full((num_blocks, largest), NOTHING, np.int64)
        self.open = np.full(
            (len(scheduler.state.rules), scheduler.config.max_num_seqs, largest), NOTHING, np.int64
        )
        self.states: dict[int, tuple[int, int]] = {}
        self.check_writes = check_writes
        self.num_tokens = 0
        self.known: dict[tuple[int, int], list[int]] = {}
        self.all_logits: dict[str, dict[int, int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for op in plan.ops:
            self._apply(op)
        # all queries of a step see the keys of that step, so write first, then look
        for piece in plan.chunks:
            self._write(piece)
        for _ in range(2):  # a step can be repeated: nothing that it reads is written over
            for piece in plan.chunks:
                self._append_narrow(piece)
        samples = []
        for piece in plan.chunks:
            self._look(piece)
            self.num_tokens += piece.length
            if piece.num_samples:
                samples.append(self._sample(piece))
        return StepResult(plan.step, samples)

    def _apply(self, op):
        rule = self.scheduler.state.rules[op.group]
        if isinstance(op, Zero):
            assert rule.is_state
            self.states[op.block] = (0, NOTHING)
        elif isinstance(op, CopyOpen):
            assert rule.is_narrow
            assert 0 < op.num_tokens < rule.block_size
            assert op.src_seat != op.dst_seat
            self.open[op.group, op.dst_seat, : op.num_tokens] = self.open[
                op.group, op.src_seat, : op.num_tokens
            ]
        elif isinstance(op, Copy):
            assert op.src != op.dst
            assert op.dst != 0
            self._may_write(op.dst)
            if rule.is_state:
                self.states[op.dst] = self.states[op.src]
            else:
                assert 0 < op.num_tokens <= rule.block_size
                self.slots[op.dst, : op.num_tokens] = self.slots[op.src, : op.num_tokens]
                if op.num_tokens == rule.block_size:
                    self.sealed[op.dst] = self.sealed[op.src]

    def _may_write(self, block):
        if self.check_writes:
            pool = self.scheduler.state.pool
            assert pool.node[block] == 0, f"published block {block} is written"
            assert pool.refs[block] >= 1, f"block {block} is written and nobody holds it"

    def fingerprints(self, seq):
        tokens = seq.token_ids(0, seq.num_tokens).tolist()
        known = self.known.get((seq.seq_id, seq.regime))
        if known is None or len(known) > len(tokens):
            known = prefix_fingerprints(seq.request, tokens, seq.regime)
        value = known[-1]
        for token in tokens[len(known) :]:
            value = step_fingerprint(value, token)
            known.append(value)
        self.known[seq.seq_id, seq.regime] = known
        return known

    def _write(self, piece):
        seq, start, length = piece.seq, piece.start, piece.length
        assert length >= 1
        assert start + length <= seq.num_tokens
        found = self.fingerprints(seq)
        for rule, table in zip(self.scheduler.state.rules, seq.tables, strict=True):
            if rule.is_state:
                want = (start, found[start - 1] if start else NOTHING)
                assert table.num_blocks == rule.pages_per_entry
                for page in table.blocks.tolist():
                    assert self.states[page] == want, f"state {self.states[page]}, want {want}"
                    self._may_write(page)
                    self.states[page] = (start + length, found[start + length - 1])
                continue
            size = rule.block_size
            positions = np.arange(start, start + length)
            blocks = table.blocks[positions // size]
            for block in set(blocks.tolist()):
                assert block != 0
                self._may_write(block)
            self.slots[blocks, positions % size] = found[start : start + length]

    def _append_narrow(self, piece):
        """What an append does: seal every block that is complete, keep the rest in the open block."""
        seq, start = piece.seq, piece.start
        end = start + piece.length
        found = np.array(self.fingerprints(seq))
        for rule in self.scheduler.state.rules:
            if not rule.is_narrow:
                continue
            size = rule.block_size
            kept = self.open[rule.index, seq.seat]
            for place in range(start // size, end // size):
                first = place * size
                num_kept = max(start - first, 0)
                block = seq.tables[rule.index].blocks[place]
                assert block != 0
                self._may_write(block)
                self.sealed[block, :num_kept] = kept[:num_kept]
                self.sealed[block, num_kept:size] = found[first + num_kept : first + size]
                assert (self.sealed[block, :size] == found[first : first + size]).all(), (
                    f"sequence {seq.seq_id} seals block {place} of group {rule.index} from another one"
                )
            first = max(start, end // size * size)
            kept[first % size : first % size + end - first] = found[first:end]

    def _look_narrow(self, piece, rule):
        """Every query finds its own block as computed and the earlier ones sealed."""
        seq, start, end = piece.seq, piece.start, piece.start + piece.length
        size, found = rule.block_size, np.array(self.fingerprints(seq))
        blocks = seq.tables[rule.index].blocks
        kept = self.open[rule.index, seq.seat]
        for query in range(start, end):
            own = query // size * size
            for first, stop in rule.reach.sees(query):
                old = np.arange(first, min(stop, own))
                assert (self.sealed[blocks[old // size], old % size] == found[old]).all()
                fresh = np.arange(max(first, own), min(stop, start))
                assert (kept[fresh % size] == found[fresh]).all(), (
                    f"sequence {seq.seq_id}: query {query} finds another open block in seat {seq.seat}"
                )

    def _look(self, piece):
        seq = piece.seq
        self._check_regime(piece)
        found = self.fingerprints(seq)
        start, end = piece.start, piece.start + piece.length
        for rule, table in zip(self.scheduler.state.rules, seq.tables, strict=True):
            if rule.is_state:
                continue
            if rule.is_narrow:
                self._look_narrow(piece, rule)
            size = rule.block_size
            is_needed = np.zeros(end, np.bool_)
            for query in (end - 1,) if rule.is_full else range(start, end):
                for first, stop in rule.reach.sees(query):
                    is_needed[first:stop] = True
            positions = np.flatnonzero(is_needed)
            blocks = table.blocks[positions // size]
            assert blocks.all(), f"a position of group {rule.index} is gone"
            wrong = self.slots[blocks, positions % size] != np.array(found)[positions]
            assert not wrong.any(), (
                f"sequence {seq.seq_id}: position {positions[wrong][0]} of group {rule.index} in "
                f"block {blocks[wrong][0]} holds another prefix"
            )

    def _check_regime(self, piece):
        """Nothing is computed beyond the lengths of a regime; logits are of their own one."""
        regimes = self.scheduler.config.regimes or PositionRegimes(NEVER)
        start, end = piece.start, piece.start + piece.length
        assert regimes.of(end) <= piece.seq.regime
        if piece.logits == "all":
            assert regimes.of(start + 1) == piece.seq.regime
            rows = self.all_logits.setdefault(piece.seq.request.request_id, {})
            for position in range(start, end):
                rows[position] = piece.seq.regime

    def _sample(self, piece):
        seq = piece.seq
        regimes = self.scheduler.config.regimes or PositionRegimes(NEVER)
        assert piece.start + piece.length == seq.num_tokens
        assert seq.regime == regimes.of(seq.num_tokens)
        value = self.fingerprints(seq)[-1]
        if seq.request.beam_width:
            return candidates(value, piece.num_samples)
        if piece.num_samples > 1:
            return [choose(value, index) for index in range(piece.num_samples)]
        return [choose(value, seq.sample_index)]


class Simulation:
    """A scheduler with its pretend executor, checked after every step."""

    def __init__(self, groups, num_blocks, check=True, **settings) -> None:
        self.clock = ManualClock()
        config = SchedulerConfig(**settings)
        self.scheduler = Scheduler(kv_plan(groups, num_blocks), config, self.clock)
        self.executor = PretendExecutor(self.scheduler)
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.started: dict[str, RequestStarted] = {}
        self.finished: dict[str, RequestFinished] = {}
        self.samples: dict[tuple[str, int], SampleFinished] = {}
        self.started_at: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.check = check
        self.num_steps = 0

    @property
    def stats(self):
        return self.scheduler.stats()

    @property
    def counters(self):
        return self.scheduler.stats().counters

    def add(self, name, prompt, max_tokens=4, **fields):
        request = Request(name, list(prompt), max_tokens, **fields)
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.plan()
        self.check_plan(plan)
        result = self.executor.execute(plan)
        self.note(self.scheduler.commit(plan, result))
        self.clock.advance(1.0)
        self.num_steps += 1
        if self.check:
            self.scheduler.check_integrity().raise_if_broken()
        return plan

    def check_plan(self, plan):
        config = self.scheduler.config
        self.plans = [*self.plans[-50:], plan]
        assert plan.num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(plan.chunks) <= config.max_num_seqs
        assert self.scheduler.num_running <= config.max_num_seqs
        assert len({piece.seq.seq_id for piece in plan.chunks}) == len(plan.chunks)
        for event in plan.started:
            assert event.request_id not in self.started
            self.started[event.request_id] = event
        for piece in plan.chunks:
            self.started_at.setdefault(piece.seq.request.request_id, plan.step)
            assert piece.length <= (config.max_chunk_tokens or piece.length)
        if self.check:
            self.scheduler.check_integrity().raise_if_broken()

    def note(self, events):
        for event in events:
            if isinstance(event, TokenEvent):
                key = (event.request_id, event.sample_index)
                self.answers.setdefault(key, []).append(event.choice.token_id)
            elif isinstance(event, SampleFinished):
                self.samples[(event.request_id, event.sample_index)] = event
            else:
                self.finished[event.request_id] = event

    def run(self, max_steps=3_000):
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return self
            self.step()
        state = self.scheduler.state
        lines = [
            f"{seq.request.request_id}/{seq.seq_id} {seq.book.rank} running={seq.book.is_running} "
            f"{seq.num_computed_tokens}/{seq.num_tokens} {seq.book.waits_for} "
            f"delivered={seq.book.beam_delivered} preempted={seq.book.num_preemptions} "
            f"held={[table.blocks.tolist() for table in seq.tables]}"
            for seq in (*state.running, *state.waiting)
        ]
        raise AssertionError("\n".join((f"not finished after {max_steps} steps", *lines)))

    def ask(self, name, prompt, max_tokens=4, **fields):
        """Run one request to its end and check its answer."""
        request = self.add(name, prompt, max_tokens, **fields)
        self.run()
        if not request.beam_width:
            for index in range(request.n):
                config = self.scheduler.config
                border, step = config.regime_border, config.regime_step
                want = right_answer(request, max_tokens, index, border, step)
                assert self.answers.get((name, index), []) == want
        return self.finished[name]
