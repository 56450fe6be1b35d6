"""The scheduler: which sequences compute what in the next step, and on which blocks.

    add() --> waiting --> plan() --> executor --> commit() --> events
                 ^          |                        |
                 +----------+-- preempted            +--> finished: blocks cached for later

`plan` reserves blocks and describes the step, `commit` takes its results in; between the two,
nothing changes: aborts that come meanwhile are carried out by `commit`. Not safe for several
threads; `abort` and `finish` may come between `plan` and `commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvern.core.admission import admit
from kvern.core.book import BeamSearch, RequestRecord, SequenceBook, SpanHashes
from kvern.core.clock import Clock, monotonic_clock
from kvern.core.committer import check_result, close_asked, commit_step, discard_step
from kvern.core.config import SchedulerConfig
from kvern.core.events import Subscriber
from kvern.core.index import PrefixIndex
from kvern.core.integrity import IntegrityReport, check_integrity
from kvern.core.pinning import pin_prefix
from kvern.core.plan import Event, StepPlan, StepResult
from kvern.core.planner import plan_running, settle_forks, top_up
from kvern.core.regimes import first_regime
from kvern.core.residency import Residency
from kvern.core.rules import make_rules, span_tokens
from kvern.core.sequence import Request, Sequence, token_array
from kvern.core.state import Draft, SchedulerState
from kvern.core.stats import CacheStats
from kvern.errors import CapacityError, InputError, IntegrityError, UsageError
from kvern.spec import KVPlan

NO_CONTEXT = 1 << 30
"""Longest sequence of a model whose cache does not grow, when no context length is set."""


class Scheduler:
    """Plans steps over one pool of blocks.

    Args:
        kv_plan: groups, page size and number of blocks.
        config: limits and switches.
        clock: seconds; the machine's monotonic clock unless given.

    Raises:
        UsageError: the pool has fewer open blocks than sequences may run.
    """

    def __init__(
        self,
        kv_plan: KVPlan,
        config: SchedulerConfig | None = None,
        clock: Clock = monotonic_clock,
    ) -> None:
        self.config = config = config or SchedulerConfig()
        if 0 < kv_plan.num_open_blocks < config.max_num_seqs:
            raise UsageError(
                f"the pool is planned for {kv_plan.num_open_blocks} open blocks per group and "
                f"max_num_seqs is {config.max_num_seqs}: plan it for as many"
            )
        self.kv_plan = kv_plan
        rules = make_rules(kv_plan)
        index = PrefixIndex(
            kv_plan.num_blocks,
            rules,
            span_tokens(kv_plan),
            clock,
            replacement=config.replacement,
            hash_bits=config.hash_bits,
            secret=config.hash_secret,
            max_state_pages=_state_pages(kv_plan, config),
        )
        residency = Residency(
            index, shares=config.shares, checkpoint_tokens=config.state_checkpoint_tokens
        )
        self.state = SchedulerState(config, rules, index, index.pool, residency, clock)
        self._longest = self._longest_that_fits(kv_plan.num_blocks - 1, config.max_model_len)
        self._draft: Draft | None = None
        self._plan: StepPlan | None = None
        self._step = 0
        self._num_added = 0
        self._num_pins = 0

    # -------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> int:
        """Accept a request; it starts in one of the next steps.

        Returns:
            The limit of generated tokens in force: `max_tokens`, or what context and pool allow.

        Raises:
            InputError: the id is in use, or the request contradicts itself.
            CapacityError: it can never fit into the context or the pool.
        """
        state = self.state
        if request.request_id in state.records:
            raise InputError(f"request id {request.request_id} is in use; choose another")
        prompt = token_array(request)
        max_tokens = self._checked_max_tokens(request, len(prompt))
        arrival = state.clock() if request.arrival is None else request.arrival
        record = RequestRecord(request, self._num_added, arrival, prompt, max_tokens)
        if request.beam_width:
            record.beam = BeamSearch()
        state.next_seq_id += 1
        seq = Sequence(state.next_seq_id, request, prompt, len(state.rules))
        seq.regime = first_regime(state, request)
        key = state.key_of(request, seq.regime)
        root = state.index.hold_root(key)
        state.index.tree.refs[root] += 1
        rank = (request.priority, arrival, self._num_added, 0)
        hashes = SpanHashes(state.index.root_hash(root))
        seq.book = SequenceBook(rank, record, hashes, root, root)
        state.residency.schedule_events(seq)
        record.live.append(seq)
        state.records[request.request_id] = record
        state.counters.requests_added += 1
        self._num_added += 1
        state.enqueue(seq)
        return max_tokens

    def abort(self, request_id: str) -> list[Event]:
        """End a request; while a step runs, the next commit reports it. Unknown ids are ignored."""
        return self._close(request_id, None, "abort")

    def finish(self, request_id: str, sample_index: int = 0, reason: str = "stop") -> list[Event]:
        """End one sample (a stop string was found, say); as `abort` otherwise."""
        return self._close(request_id, sample_index, reason)

    def _close(self, request_id: str, sample_index: int | None, reason: str) -> list[Event]:
        record = self.state.records.get(request_id)
        if record is None:
            return []
        if record.beam is not None:
            sample_index = None
        if not record.closing:
            self.state.closing.append(record)
        record.closing[sample_index] = reason
        events: list[Event] = []
        if self._draft is None:
            close_asked(self.state, events)
            self._deliver()
        return events

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.state.records)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self.state.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self.state.waiting)

    # ------------------------------------------------------------------------------------ steps

    def plan(self) -> StepPlan:
        """Describe the next step; it must be committed or discarded before the next one.

        Raises:
            IntegrityError: the step before was neither committed nor discarded.
        """
        if self._draft is not None:
            raise IntegrityError(f"step {self._step} was neither committed nor discarded")
        state = self.state
        if state.pins:
            state.expire_pins()
        draft = Draft(state.config.max_num_batched_tokens)
        if state.unsettled:
            settle_forks(state, draft)
        plan_running(state, draft)
        if state.waiting:
            admit(state, draft)
        top_up(state, draft)
        self._step += 1
        self._draft = draft
        self._plan = StepPlan(
            self._step, tuple(draft.ops), tuple(draft.chunks.values()), tuple(draft.started)
        )
        self._deliver()
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take the results of the planned step in.

        The result is checked as a whole before anything changes: when it is refused, the step is
        still there to be committed with another one or discarded.

        Raises:
            IntegrityError: the plan is not the present one, or the result does not match it.
        """
        draft = self._current(plan)
        check_result(plan, result)
        events = commit_step(self.state, draft, plan, result)
        self._draft = self._plan = None
        close_asked(self.state, events)
        self._deliver()
        return events

    def discard(self, plan: StepPlan) -> list[Event]:
        """Forget a planned step that failed: its sequences start again from the cache."""
        draft = self._current(plan)
        discard_step(self.state, draft, plan)
        self._draft = self._plan = None
        events: list[Event] = []
        close_asked(self.state, events)
        self._deliver()
        return events

    def _deliver(self) -> None:
        """Tell subscribers what has happened to the cache; nothing is half done any more."""
        if self.state.index.events:
            self.state.index.events.deliver()

    def _current(self, plan: StepPlan) -> Draft:
        if self._draft is None or plan is not self._plan:
            raise IntegrityError(f"step {plan.step} is not the step that was planned last")
        return self._draft

    # ------------------------------------------------------------------------------------ cache

    def pin(self, request: Request, ttl_s: float) -> tuple[int, int]:
        """Hold the stored prefix of a prompt for `ttl_s` seconds.

        Pins yield, soonest end first, when a request could not run otherwise.

        Returns:
            (pin id, tokens held).
        """
        self._num_pins += 1
        num_tokens = pin_prefix(self.state, self._num_pins, request, ttl_s)
        self._deliver()
        return self._num_pins, num_tokens

    def unpin(self, pin_id: int) -> bool:
        """Release a pin; False if it is gone already."""
        return self.state.unpin(pin_id)

    def clear(self) -> int:
        """Drop all cached blocks that nobody holds; returns how many."""
        num_dropped = self.state.index.clear()
        self._deliver()
        return num_dropped

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Follow cache events (stored, removed, cleared); the result ends the subscription."""
        return self.state.index.events.subscribe(subscriber)

    def stats(self) -> CacheStats:
        """Counters and the pool's present state."""
        state = self.state
        pool, index = state.pool, state.index
        return CacheStats(
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            in_use_blocks=pool.num_in_use,
            page_bytes=self.kv_plan.page_bytes,
            running=len(state.running),
            waiting=len(state.waiting),
            replaced_blocks=index.num_replaced,
            cleared_blocks=index.num_cleared,
            deduplicated_blocks=index.num_deduplicated,
            hash_collisions=index.tree.num_collisions,
            kept_state_pages=index.num_state_pages,
            pinned_blocks=sum(len(run) for pin in state.pins.values() for run in pin.blocks),
            counters=replace(state.counters),
        )

    def check_integrity(self, repair: bool = False) -> IntegrityReport:
        """Verify pool, tables and index against each other, between steps or during one.

        Args:
            repair: drop what is unreferenced and recount what is not.
        """
        held = self._draft.held if self._draft else []
        copies = self._draft.copies if self._draft else []
        report = check_integrity(self.state, held, copies, repair=repair)
        self._deliver()
        return report

    # ----------------------------------------------------------------------------------- limits

    def pages_for(self, num_tokens: int) -> int:
        """Most pages that one sequence of `num_tokens` holds at once."""
        return sum(rule.most_held(num_tokens) for rule in self.state.rules)

    def _checked_max_tokens(self, request: Request, num_prompt_tokens: int) -> int:
        """The limit of generated tokens, or an error that says why there is none."""
        wanted = request.max_tokens
        context = self.config.max_model_len
        needs_answer = not (request.needs_all_logits and wanted == 0)
        if context is not None and num_prompt_tokens + needs_answer > context:
            raise CapacityError(
                f"the prompt has {num_prompt_tokens:,} tokens and the context {context:,}: "
                f"shorten it{' so that an answer has room' if needs_answer else ''}"
            )
        if context is not None and wanted is not None and num_prompt_tokens + wanted > context:
            raise CapacityError(
                f"{num_prompt_tokens:,} prompt tokens and max_tokens {wanted:,} "
                f"exceed the context of {context:,}: ask for at most "
                f"{context - num_prompt_tokens:,} tokens"
            )
        usable = self.kv_plan.num_blocks - 1
        longest = self._longest
        least = num_prompt_tokens + max(wanted or 0, 1) - 1
        if least > longest:
            raise CapacityError(
                f"{num_prompt_tokens:,} prompt tokens"
                + (f" and max_tokens {wanted:,}" if wanted else "")
                + f" need {self.pages_for(least):,} blocks, and the pool has {usable:,} "
                f"(room for {longest:,} tokens): shorten it or enlarge the KV memory"
            )
        if wanted is not None:
            return wanted
        most = longest - num_prompt_tokens + 1
        return most if context is None else min(most, context - num_prompt_tokens)

    def _longest_that_fits(self, num_pages: int, context: int | None) -> int:
        """The longest sequence that the pool can hold alone."""
        rules = self.state.rules
        low, high = 0, context or NO_CONTEXT
        if any(rule.is_full for rule in rules):
            high = min(high, num_pages * max(rule.block_size for rule in rules))
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_for(middle) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low


def _state_pages(kv_plan: KVPlan, config: SchedulerConfig) -> int:
    if config.max_state_checkpoint_bytes is None:
        largest = sum(group.pages_per_entry for group in kv_plan.groups if group.is_state)
        return max(kv_plan.num_blocks // 4, 2 * largest)
    return config.max_state_checkpoint_bytes // kv_plan.page_bytes
