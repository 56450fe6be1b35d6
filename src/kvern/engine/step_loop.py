"""The step loop: plan, execute, commit, for all requests at once.

    submit ──> scheduler.plan() ──> runner.execute(plan) ──> scheduler.commit(plan, result) ──> tracker
                    ^                                                                              │
                    └───────────────── step(), again and again ────────────────────────────────────┘

One lock makes it safe for several threads: whoever waits for its own answer takes the next step for
everybody.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence

from kvern.core.scheduler import Scheduler
from kvern.core.sequence import Request
from kvern.engine.runner import Runner
from kvern.engine.tracking import RequestState, Tracker
from kvern.errors import IntegrityError, KvernError


class StepLoop:
    """Drives a scheduler and a runner, and keeps track of what callers are waiting for."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tracker: Tracker, clock: Callable[[], float]
    ) -> None:
        """Args: clock: seconds, for the requests' timing."""
        self.scheduler = scheduler
        self.runner = runner
        self.tracker = tracker
        self.lock = threading.RLock()
        self._clock = clock
        regimes = scheduler.config.regimes
        self._warns_at_border = regimes is not None and regimes.is_brief

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        with self.lock:
            return self.scheduler.has_work

    def submit(self, requests: Iterable[tuple[Request, str | None]]) -> list[RequestState]:
        """Add requests, each with the text of its prompt: all of them, or, when one is refused, none.

        Raises:
            InputError, CapacityError: as `Scheduler.add`.
        """
        with self.lock:
            states: list[RequestState] = []
            try:
                for request, text in requests:
                    states.append(self._add(request, text))
            except KvernError:
                self.release(states)
                raise
            return states

    def _add(self, request: Request, text: str | None) -> RequestState:
        state = RequestState(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=tuple(int(t) for t in request.prompt),
            sampling=request.sampling,
            stops=request.sampling.params.stop_strings,
            arrived_s=self._clock(),
        )
        self.scheduler.add(request)
        self.tracker.add(state)
        return state

    def step(self) -> bool:
        """One step for all requests; False when there was nothing to do.

        Whatever interrupts it, the plan is discarded and the bookkeeping stays sound.
        """
        with self.lock:
            if not self.scheduler.has_work:
                return False
            plan = self.scheduler.plan()
            self.tracker.note_started(plan.started)
            if self._warns_at_border and any(chunk.seq.regime for chunk in plan.chunks):
                self._warn_of_border()
            try:
                result = self.runner.execute(plan)
                failures = self.runner.take_failures()
                self.tracker.note_failures(failures)
                events = self.scheduler.commit(plan, result)
            except BaseException:
                self.tracker.consume(self.scheduler.discard(plan), self._finish_sample)
                raise
            self.tracker.consume(events, self._finish_sample)
            for request_id in failures:
                self.abort(request_id)
            return True

    def _warn_of_border(self) -> None:
        self._warns_at_border = False
        border = self.scheduler.config.regime_border
        warnings.warn(
            f"a sequence is longer than {border:,} tokens, beyond which this model turns all positions by "
            "the length (dynamic NTK scaling): each further token computes its whole sequence again; "
            f"max_model_len={border} stays below",
            stacklevel=2,
        )

    def advance(self, is_ready: Callable[[], bool]) -> None:
        """One step, unless another thread's step has already brought what the caller waits for."""
        with self.lock:
            if not is_ready() and not self.step():
                raise IntegrityError(
                    "a request is lost: it has no result and nothing is left to do"
                )

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are given back, what is finished stays in the cache."""
        with self.lock:
            self.tracker.consume(self.scheduler.abort(request_id), self._finish_sample)

    def release(self, states: Sequence[RequestState]) -> None:
        """Forget requests; aborts those that still run."""
        with self.lock:
            for state in states:
                if state.output is None and state.request_id in self.tracker.requests:
                    self.abort(state.request_id)
                self.tracker.forget(state.request_id)

    def _finish_sample(self, request_id: str, sample_index: int, reason: str) -> None:
        events = self.scheduler.finish(request_id, sample_index, reason)
        self.tracker.consume(events, self._finish_sample)
