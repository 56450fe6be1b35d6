"""One engine under observation: requests go in, steps are taken, and at the end everything is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvern.check.names import Fault, Finding
from kvern.check.watch import Watch, pool_of
from kvern.engine.llm import LLM
from kvern.engine.params import SamplingParams
from kvern.engine.tracking import RequestState

MAX_IDLE_STEPS = 500
"""Steps without a single computed token after which an engine counts as stuck."""


class EngineFailedError(Exception):
    """The engine raised, or stopped making progress; the session holds the finding."""


class Session:
    """Drives one engine step by step; see `Watch` for what is recorded.

    Attributes:
        findings: faults named so far.
        states: requests by name.
        aborted: requests that are ended on purpose.
    """

    def __init__(self, llm: LLM, watch: Watch) -> None:
        self.llm = llm
        self.watch = watch
        self.findings: list[Finding] = []
        self.states: dict[str, RequestState] = {}
        self.aborted: set[str] = set()
        self._is_broken = False
        self._has_failed = False

    # -- driving -------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: Sequence[int], max_tokens: int = 1, **params: Any) -> None:
        """Add a request; greedy and deaf to end tokens unless told otherwise."""
        chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        try:
            self.states[name] = self.llm.submit(list(tokens), chosen, request_id=name)
        except Exception as error:
            self._fail(f"request {name} was refused: {type(error).__name__}: {error}", error)

    def abort(self, name: str) -> None:
        """End a request now, on purpose."""
        self.aborted.add(name)
        try:
            self.llm.abort(name)
        except Exception as error:
            self._fail(f"aborting {name} raised {type(error).__name__}: {error}", error)

    def preempt(self, name: str, *, forget: bool = False) -> None:
        """Take a running request's blocks away between two steps, as a full pool does.

        Args:
            name: the request; nothing happens unless it runs.
            forget: drop what is cached too, so that it is computed again instead of found.
        """
        state = self.llm.model.scheduler.state
        for seq in [seq for seq in state.running if seq.request.request_id == name]:
            state.preempt(seq)
        if forget:
            self.llm.reset_cache()

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        try:
            is_working = self.llm.step()
        except Exception as error:
            self._fail(f"a step raised {type(error).__name__}: {error}", error)
        self.watch.after_step()
        self._check_integrity()
        return is_working

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Step until something has happened, or nothing is left to do."""
        idle, processed = 0, self.watch.num_rows_processed
        while not is_reached() and self.llm.has_work:
            self.step()
            idle = idle + 1 if self.watch.num_rows_processed == processed else 0
            processed = self.watch.num_rows_processed
            if idle > MAX_IDLE_STEPS:
                self._fail(f"no token was computed in {MAX_IDLE_STEPS} steps with requests waiting")

    def run_steps(self, count: int) -> None:
        """At most that many steps."""
        for _ in range(count):
            if not self.llm.has_work:
                return
            self.step()

    def finish(self) -> None:
        """Step until every request has ended."""
        self.run_until(lambda: False)

    # -- looking --------------------------------------------------------------------------------------

    def num_computed(self, name: str) -> int:
        """Positions computed or found so far by the furthest sequence of a request."""
        ends = [
            start + length
            for note in self.watch.notes.values()
            if note.request_id == name
            for start, length in note.chunks
        ]
        return max(ends, default=0)

    def num_generated(self, name: str) -> int:
        """Tokens generated so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.states[name].samples.values())

    def cached_tokens(self, name: str) -> int:
        """Prompt tokens found in the cache; 0 when it has not ended."""
        output = self.states[name].output
        return 0 if output is None else output.cached_tokens

    def num_preemptions(self) -> int:
        """Over all finished requests."""
        outputs = [state.output for state in self.states.values()]
        return sum(output.num_preemptions for output in outputs if output is not None)

    # -- verdict ----------------------------------------------------------------------------------------

    def find(self, fault: Fault, sentence: str, basis: str = "comparison") -> None:
        """Note a fault once."""
        finding = Finding(fault, sentence, basis)
        if finding not in self.findings:
            self.findings.append(finding)

    def close(self) -> None:
        """Verify outcomes, pool, pages and counters, and take over what the watch has found."""
        self.watch.verify_all()
        self.watch.settle()
        self.findings += self.watch.findings
        self.findings += [
            Finding(violation.fault, violation.sentence, "bookkeeping")
            for violation in self.watch.shadow.violations
        ]
        self._check_outcomes()
        if not self.llm.has_work:
            self._check_pool()
        if not self._has_failed:
            self._check_stats()
        self._let_go()

    def _let_go(self) -> None:
        """End what still runs and give the pool's memory back; a broken pool may resist."""
        try:
            for state in self.states.values():
                self.llm.release(state)
            self.watch.detach()
            self.llm.close()
        except Exception as error:
            self.find(
                Fault.NO_RESULT, f"ending the requests raised {type(error).__name__}: {error}"
            )

    def _fail(self, sentence: str, cause: Exception | None = None) -> None:
        self._has_failed = True
        self.find(Fault.NO_RESULT, sentence)
        raise EngineFailedError(sentence) from cause

    def _check_outcomes(self) -> None:
        for name, state in self.states.items():
            output = state.output
            if output is None:
                self.find(Fault.NO_RESULT, f"request {name} has no result")
            elif output.error is not None:
                self.find(Fault.NOT_FINITE, f"request {name} failed: {output.error}")
            elif output.finish_reason == "abort" and name not in self.aborted:
                self.find(Fault.NO_RESULT, f"request {name} was aborted by the engine")
            elif name not in self.aborted:
                self._check_length(name, state)

    def _check_length(self, name: str, state: RequestState) -> None:
        output, wanted = state.output, state.sampling.params.max_tokens
        assert output is not None
        for choice in output.choices:
            if wanted is not None and len(choice.token_ids) != wanted:
                self.find(
                    Fault.TOKENS_LOST,
                    f"request {name} was to give {wanted} tokens and sample {choice.index} has "
                    f"{len(choice.token_ids)}",
                )

    def _check_integrity(self) -> None:
        """The engine's own invariants, at every step until they break; what follows is no news."""
        if self._is_broken:
            return
        problems = self.llm.check_integrity().problems
        self._is_broken = bool(problems)
        for problem in problems[:2]:
            self.find(Fault.INVARIANT, f"after step {self.watch.step}: {problem}", "counters")

    def _check_pool(self) -> None:
        pool = pool_of(self.llm)
        held = int((pool.refs != 0).sum())
        if held:
            self.find(
                Fault.LEAK,
                f"{held} blocks are still held after every request has ended",
                "counters",
            )
        if pool.num_free + pool.num_cached + pool.num_in_use + 1 != pool.num_blocks:
            self.find(
                Fault.LEAK,
                f"{pool.num_free} free, {pool.num_cached} cached and {pool.num_in_use} used blocks and the "
                f"null block are not {pool.num_blocks}",
                "counters",
            )

    def _check_stats(self) -> None:
        counters, work = self.llm.stats().counters, self.llm.work
        values = dataclasses.asdict(counters)
        sums = {
            "queries = hits + misses": (counters.queries, counters.hits + counters.misses),
            "prompt_tokens = computed + cached": (
                counters.prompt_tokens,
                counters.computed_prompt_tokens + counters.cached_prompt_tokens,
            ),
            "computed_tokens = prompt + generated + recomputed": (
                counters.computed_tokens,
                counters.computed_prompt_tokens
                + counters.computed_generated_tokens
                + counters.regime_recomputed_tokens
                + counters.recomputed_tokens
                + counters.uncached_recomputed_tokens,
            ),
            "tokens processed = rows seen": (work.tokens_processed, self.watch.num_rows_processed),
            "tokens processed = computed_tokens": (work.tokens_processed, counters.computed_tokens),
            "query-key products = keys seen": (work.query_key_products, self.watch.num_products),
        }
        for name, (left, right) in sums.items():
            if left != right:
                self.find(
                    Fault.ACCOUNTING, f"{name} does not hold: {left:,} and {right:,}", "counters"
                )
        if any(isinstance(value, int) and value < 0 for value in values.values()):
            self.find(Fault.ACCOUNTING, f"a counter is negative: {values}", "counters")
