"""kvern: an LLM inference engine built around a key-value cache you can trust.

Names are loaded when they are first used, so that ``import kvern`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvern._version import __version__

if TYPE_CHECKING:
    from kvern.engine.async_llm import AsyncLLM
    from kvern.engine.llm import LLM
    from kvern.engine.outputs import RequestOutput, StreamDelta
    from kvern.engine.params import SamplingParams
    from kvern.errors import KvernError

_HOMES = {
    "AsyncLLM": "kvern.engine.async_llm",
    "LLM": "kvern.engine.llm",
    "RequestOutput": "kvern.engine.outputs",
    "SamplingParams": "kvern.engine.params",
    "StreamDelta": "kvern.engine.outputs",
    "KvernError": "kvern.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "KvernError",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvern' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
