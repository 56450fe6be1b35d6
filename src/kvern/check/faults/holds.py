"""Where a fault takes hold of an engine: an operation, a plan, what the decoder is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvern.check.watch import wrap
from kvern.core.plan import Chunk, StepPlan
from kvern.engine.llm import LLM
from kvern.kernels.protocol import AttendBatch, Backend

Batches = Sequence[AttendBatch]
ChangeForward = Callable[[Any, Batches, Sequence[Chunk]], tuple[Any, Batches]]
"""(token ids, batches, chunks) to what the decoder is given instead."""


class BackendProxy:
    """A backend with one operation replaced."""

    def __init__(self, inner: Backend, **operations: Callable[..., Any]) -> None:
        self._inner = inner
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        return self._operations.get(name) or getattr(self._inner, name)


def replace_operation(llm: LLM, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Put another operation in the place of the backend's, for this engine alone."""
    decoder = llm.model.runner.decoder
    inner = decoder.backend
    setattr(decoder, "backend", BackendProxy(inner, **{name: make(getattr(inner, name))}))  # noqa: B010


def on_plan(llm: LLM, change: Callable[[StepPlan], StepPlan]) -> None:
    """Have the executor carry out another plan than the one that was made."""

    def make(execute: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
        return lambda plan: execute(change(plan))

    wrap(llm.model.runner, "execute", make)


def on_forward(llm: LLM, change: ChangeForward) -> None:
    """Change what the decoder is given, knowing the step's chunks."""
    current: list[StepPlan] = []

    def make_execute(execute: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
        def tampered(plan: StepPlan) -> Any:
            current[:] = [plan]
            return execute(plan)

        return tampered

    def make_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def tampered(token_ids: Any, batches: Batches, *rest: Any) -> Any:
            return forward(*change(token_ids, batches, current[0].chunks), *rest)

        return tampered

    wrap(llm.model.runner, "execute", make_execute)
    wrap(llm.model.runner.decoder, "forward", make_forward)


def with_positions(batch: AttendBatch, positions: Any) -> AttendBatch:
    """The batch with other positions; its slots stay."""
    return replace(batch, positions=np.asarray(positions, np.int32), backend_data={})
