"""Why a prompt was not found in the cache in full."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissReport:
    """What a request found in the cache when it started, and why not more."""

    num_prompt_tokens: int
    num_cached_tokens: int
