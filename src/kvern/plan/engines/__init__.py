"""One module per engine: how it turns memory into cache, and what it prints about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from kvern.errors import UsageError
from kvern.plan.request import PlanRequest
from kvern.plan.result import Allocation, Budget


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as the planner calls it.

    Attributes:
        name: the name in answers.
        allocate: the rules: budgets of all ranks in, allocation out.
        default_utilization: share of a device's memory the engine plans with, by request.
        reserve: assumed activations and runtime, by request: (bytes, why).
    """

    name: str
    allocate: Callable[[PlanRequest, tuple[Budget, ...]], Allocation]
    default_utilization: Callable[[PlanRequest], float]
    reserve: Callable[[PlanRequest], tuple[int, str]]


MODULES = {
    "kvern": "kvern_pool",
    "vllm": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama_cpp",
    "llama_cpp": "llama_cpp",
    "llamacpp": "llama_cpp",
    "ik_llama.cpp": "llama_cpp",
}


def load_engine(name: str) -> Engine:
    """The engine called `name`; only its module is imported.

    Raises:
        UsageError: the name is not known.
    """
    module = MODULES.get(name.lower())
    if module is None:
        raise UsageError(
            f"unknown engine {name!r}: choose kvern, vllm[@VERSION], sglang[@VERSION] or "
            "llama.cpp[@VERSION]"
        )
    engine: Engine = import_module(f"kvern.plan.engines.{module}").ENGINE
    return engine


def split_engine(text: str) -> tuple[str, str | None]:
    """Name and version of "vllm@0.19"; without @ the version is None: the newest rules hold."""
    name, separator, version = text.partition("@")
    return name.strip(), version.strip() if separator and version.strip() else None
