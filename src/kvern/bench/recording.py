"""Where a step's time goes: every backend call and every step, timed from outside.

Only profile runs are recorded; the runs that are reported are not touched. There are two: one that
times every backend call, for which the engine goes through its operations one by one, and one that
times steps alone and leaves the engine as it is, with whatever it records and repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvern.core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from kvern import LLM


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a backend; times are seconds of one clock."""

    name: str
    started_s: float
    ended_s: float
    args: tuple[Any, ...]
    result: Any


@dataclass(slots=True)
class Step:
    """One step of the engine.

    Attributes:
        seconds: planning, executing and committing it, without what looking at the blocks took.
        forward_s: the decoder, its native calls included.
        execute_s: decoder, logits and sampling.
        num_tokens: rows that went through the decoder.
        num_sequences: that they belong to.
        calls: the backend's operations in it; empty when they are not timed.
        blocks_in_use: blocks that requests hold while it runs.
    """

    seconds: float
    forward_s: float
    execute_s: float
    num_tokens: int
    num_sequences: int
    calls: list[Call]
    blocks_in_use: int


class TimedBackend:
    """A backend that notes when each of its operations begins and ends."""

    def __init__(self, inner: Any) -> None:
        """Args: inner: the backend that does the work."""
        self.inner = inner
        self.raw_calls: list[tuple[str, float, float, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.inner, name)
        if not callable(target):
            return target
        timed = self._timed(name, target)
        setattr(self, name, timed)  # found at once the next time
        return timed

    def _timed(self, name: str, target: Callable[..., Any]) -> Callable[..., Any]:
        note, clock = self.raw_calls.append, time.perf_counter

        def timed(*args: Any, **keywords: Any) -> Any:
            started = clock()
            result = target(*args, **keywords)
            note((name, started, clock(), args, result))
            return result

        return timed

    def take(self) -> list[Call]:
        """The calls since the last take."""
        calls = [Call(*raw) for raw in self.raw_calls]
        self.raw_calls.clear()
        return calls


class Recorder:
    """Steps an engine under observation; use as a context manager."""

    def __init__(self, llm: LLM, times_calls: bool) -> None:
        """Args: llm: with requests to do; times_calls: whether every backend call is timed."""
        self.steps: list[Step] = []
        self._llm = llm
        self._timed = TimedBackend(llm.model.runner.decoder.backend) if times_calls else None
        self._seen: _Seen | None = None

    def __enter__(self) -> Recorder:
        """Put the observers in place."""
        model = self._llm.model
        runner = model.runner
        execute = runner.execute

        def observed(plan: StepPlan) -> StepResult:
            started = time.perf_counter()
            blocks = model.scheduler.stats().in_use_blocks
            looking_s = time.perf_counter() - started
            result = execute(plan)
            self._seen = _Seen(plan, result.durations, blocks, looking_s)
            return result

        runner.execute = observed  # type: ignore[method-assign]
        if self._timed is not None:
            runner.decoder.backend = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        runner = self._llm.model.runner
        del runner.execute
        if self._timed is not None:
            runner.decoder.backend = self._timed.inner

    def step(self) -> bool:
        """One step, noted; False when there was nothing to do."""
        started = time.perf_counter()
        did_something = self._llm.step()
        seconds = time.perf_counter() - started
        calls = self._timed.take() if self._timed is not None else []
        seen = self._take_seen()
        if seen is not None:
            execute_s = seen.durations.get("execute_s", 0.0)
            self.steps.append(
                Step(
                    seconds=seconds - seen.looking_s,
                    forward_s=seen.durations.get("forward_s", execute_s),
                    execute_s=execute_s,
                    num_tokens=seen.plan.num_scheduled_tokens,
                    num_sequences=len(seen.plan.chunks),
                    calls=calls,
                    blocks_in_use=seen.blocks_in_use,
                )
            )
        return did_something

    def _take_seen(self) -> _Seen | None:
        seen, self._seen = self._seen, None
        return seen


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen of one step from inside."""

    plan: StepPlan
    durations: Mapping[str, float]
    blocks_in_use: int
    looking_s: float
