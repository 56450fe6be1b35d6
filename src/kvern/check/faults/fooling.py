"""Engines that could fool a careless comparison: equal with and without the cache, and useless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.check.faults.holds import replace_operation
from kvern.check.watch import wrap
from kvern.core.plan import StepPlan
from kvern.engine.llm import LLM

F32 = npt.NDArray[np.float32]


def only_nan(llm: LLM) -> None:
    """Every logit is NaN, with and without the cache."""
    _overwrite_logits(llm, float("nan"))


def always_the_same(llm: LLM) -> None:
    """Every row of logits is the same."""
    vocabulary = np.arange(llm.model.decoder.config.vocab_size, dtype=np.float32)
    _overwrite_logits(llm, vocabulary)


def _overwrite_logits(llm: LLM, value: Any) -> None:
    def make(logits: Callable[..., None]) -> Callable[..., None]:
        def tampered(hidden: F32, out: F32) -> None:
            logits(hidden, out)
            out[...] = value

        return tampered

    wrap(llm.model.runner.decoder, "logits", make)


def blind_to_the_past(llm: LLM) -> None:
    """Attention gives nothing, so that every token stands alone: no cache fault can ever show."""

    def make(attend: Callable[..., int]) -> Callable[..., int]:
        def tampered(*arguments: Any) -> int:
            products = attend(*arguments)
            arguments[-1][...] = 0
            return products

        return tampered

    replace_operation(llm, "attend", make)


def refuses_everything(llm: LLM) -> None:
    """Every step raises."""

    def make(execute: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
        def tampered(plan: StepPlan) -> Any:
            raise RuntimeError("the device is gone")

        return tampered

    wrap(llm.model.runner, "execute", make)


def never_advances(llm: LLM) -> None:
    """Steps are empty for ever."""

    def make(plan: Callable[[], StepPlan]) -> Callable[[], StepPlan]:
        return lambda: replace(plan(), ops=(), chunks=())

    wrap(llm.model.scheduler, "plan", make)
