"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.spec.regimes import PositionRegimes


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and switches.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens that a step computes at most; the worst-case step.
        max_chunk_tokens: tokens of one sequence in a step at most; None: no limit of its own.
        max_model_len: longest sequence, prompt and answer together; None: the pool decides.
        enable_prefix_caching: whether sealed blocks are found by later requests.
        no_cache: recompute every sequence from its first token in every step (for comparison).
        replacement: which cached block to give up: "lru", "lfu", "fifo", "slru" or "gdsf".
        max_head_of_line_wait_steps: steps for which a waiting request that does not fit may hold
            up those behind it. Afterwards they pass it; after `STARVATION_FACTOR` times as many
            steps, running sequences of lower rank are preempted for it, one per step, if that
            can make it fit.
        regime_border: tokens up to which positions are in the first regime; None: there is only
            one. See `kvern.core.regimes`.
        regime_step: lengths that each later regime holds; None: one holds them all.
        state_checkpoint_tokens: states are kept at multiples of this length, at the end of the
            prompt and when a sequence stops; 0: only when it stops.
        max_state_checkpoint_bytes: budget of kept states; None: a quarter of the pool,
            but at least two states.
        hash_bits: bits of the content hash that are used; fewer than 128 only to test collisions.
        hash_secret: key of the content hash; the same wherever caches are to be shared.
        model: fingerprint of weights and configuration, part of every hash.
        numerics: backend, kernel path, recipe version, weights format, part of every hash.
        kv_format: stored form, part of every hash together with the block sizes.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    no_cache: bool = False
    replacement: str = "lru"
    max_head_of_line_wait_steps: int = 8
    regime_border: int | None = None
    regime_step: int | None = None
    state_checkpoint_tokens: int = 256
    max_state_checkpoint_bytes: int | None = None
    hash_bits: int = 128
    hash_secret: bytes = b""
    model: str = ""
    numerics: str = ""
    kv_format: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible limits."""
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise UsageError(f"max_chunk_tokens is {self.max_chunk_tokens}; give at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(f"max_model_len is {self.max_model_len}; give at least 2")
        if self.regime_border is not None and self.regime_border < 1:
            raise UsageError(f"regime_border is {self.regime_border}; give at least 1")
        if self.regime_step is not None and (self.regime_step < 1 or self.regime_border is None):
            raise UsageError(
                f"regime_step is {self.regime_step}; give at least 1, and a regime_border"
            )
        if self.max_head_of_line_wait_steps < 0 or self.state_checkpoint_tokens < 0:
            raise UsageError("waiting steps and checkpoint intervals must not be negative")
        if not 1 <= self.hash_bits <= 128:
            raise UsageError(f"hash_bits is {self.hash_bits}; it must lie within 1 and 128")

    @property
    def regimes(self) -> PositionRegimes | None:
        """Which lengths share a position regime; None where all do."""
        if self.regime_border is None:
            return None
        return PositionRegimes(self.regime_border, self.regime_step)

    @property
    def shares(self) -> bool:
        """Whether blocks are published."""
        return self.enable_prefix_caching and not self.no_cache


STARVATION_FACTOR = 4
"""See `max_head_of_line_wait_steps`."""
