"""Where a step's time goes: every backend call and every step, timed from outside.

Only the profile run is recorded; the runs that are reported are not touched. What recording itself
costs per call is measured and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        calls: the backend's operations in it.
        blocks_in_use: blocks that requests hold while it runs.
    """

    seconds: float
    forward_s: float
    execute_s: float
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


def overhead_per_call_s(times: int = 2000) -> float:
    """What noting one call costs outside the noted time."""

    class Nothing:
        def do(self, *_args: object) -> None:
            return None

    def seconds(call: Callable[..., None]) -> float:
        started = time.perf_counter()
        for _ in range(times):
            call(1, 2, 3)
        return time.perf_counter() - started

    bare = Nothing()
    timed = TimedBackend(bare)
    _ = timed.do  # so that the attribute exists
    direct_s = min(seconds(bare.do) for _ in range(3))
    with_notes_s = []
    noted_s = []
    for _ in range(3):
        with_notes_s.append(seconds(timed.do))
        noted_s.append(sum(call.ended_s - call.started_s for call in timed.take()))
    noted_empty_s = min(noted_s) - direct_s
    return max(0.0, (min(with_notes_s) - direct_s - max(0.0, noted_empty_s)) / times)


@dataclass(slots=True)
class Recorder:
    """Steps an engine under observation; use as a context manager."""

    llm: LLM
    steps: list[Step] = field(default_factory=list)
    _durations: dict[str, float] = field(default_factory=dict)
    _blocks_in_use: int = 0
    _looking_s: float = 0.0
    _timed: TimedBackend | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        """Put the observers in place."""
        model = self.llm.model
        decoder, runner = model.runner.decoder, model.runner
        inner, execute = decoder.backend, runner.execute
        self._timed = TimedBackend(inner)

        def observed(plan: Any) -> Any:
            started = time.perf_counter()
            self._blocks_in_use = model.scheduler.stats().in_use_blocks
            self._looking_s = time.perf_counter() - started
            result = execute(plan)
            self._durations = dict(result.durations)
            return result

        decoder.backend = self._timed
        runner.execute = observed  # type: ignore[method-assign]

        def undo() -> None:
            decoder.backend = inner
            del runner.execute

        self._undo.append(undo)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def step(self) -> bool:
        """One step, noted; False when there was nothing to do."""
        assert self._timed is not None
        self._durations, self._looking_s = {}, 0.0
        started = time.perf_counter()
        did_something = self.llm.step()
        seconds = time.perf_counter() - started - self._looking_s
        calls = self._timed.take()
        if did_something:
            execute_s = self._durations.get("execute_s", 0.0)
            self.steps.append(
                Step(
                    seconds=seconds,
                    forward_s=self._durations.get("forward_s", execute_s),
                    execute_s=execute_s,
                    calls=calls,
                    blocks_in_use=self._blocks_in_use,
                )
            )
        return did_something
