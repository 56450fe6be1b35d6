"""The engine's settings, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.spec.budget import parse_size

BACKENDS = ("auto", "native", "reference", "torch")
WEIGHTS_FORMATS = ("auto", "fp32", "bf16")
WEIGHTS_AS = {"auto": "as stored", "fp32": "decoded to float32", "bf16": "rounded to bf16"}
"""What each weights format does with a file's weights, for reports."""
DEFAULT_KV_MEMORY = "256MiB"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine runs.

    Attributes:
        kv_format: stored form of keys and values: ``bf16``, ``fp16``, ``fp32``, ``int8``, or a mix by layer
            such as ``int8;0-1,29=bf16``.
        kv_memory: bytes of the pool, or text such as ``512MiB``.
        block_size: tokens per block.
        enable_prefix_caching: whether finished blocks can be found again.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens that one step computes at most.
        max_model_len: longest prompt plus answer; None: the model's own limit.
        backend: ``auto`` takes native where it is built, else reference.
        threads: of the native backend; None: one per core this process may use.
        weights_format: ``auto`` reads the stored form, ``fp32`` decodes it (exact, slow, larger), ``bf16``
            rounds it and the activations to bf16: larger than a quantised file's form, and made for prompts
            on a processor with tile registers (AMX).
        replacement: which cached block is reused first: ``lru``, ``lfu``, ``fifo``, ``slru``, ...
        max_chunk_tokens: tokens of one prompt that one step computes at most; None: no further limit.
        no_cache: recompute everything at every step (to compare; slow).
        max_head_of_line_wait_steps: steps for which a waiting request that does not fit may hold up
            those behind it; see `kvern.core.config.SchedulerConfig`.
        state_checkpoint_tokens: how often recurrent states are kept for later hits; see there.
        max_state_checkpoint_bytes: budget of kept states; None: a quarter of the pool.
    """

    kv_format: str = "bf16"
    kv_memory: int | str = DEFAULT_KV_MEMORY
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    backend: str = "auto"
    threads: int | None = None
    weights_format: str = "auto"
    replacement: str = "lru"
    max_chunk_tokens: int | None = None
    no_cache: bool = False
    max_head_of_line_wait_steps: int = 8
    state_checkpoint_tokens: int = 256
    max_state_checkpoint_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            UsageError: names the setting, its value and what is allowed.
        """
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "threads", "max_chunk_tokens"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        for name in ("kv_format", "replacement"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be a name")
        for name in ("enable_prefix_caching", "no_cache"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be true or false")
        if self.kv_memory_bytes <= 0:
            raise UsageError(f"kv_memory is {self.kv_memory!r}: give bytes above 0, as in 512MiB")
        if self.backend not in BACKENDS:
            raise UsageError(f"backend {self.backend!r} is unknown: choose {', '.join(BACKENDS)}")
        if self.weights_format not in WEIGHTS_FORMATS:
            raise UsageError(
                f"weights_format {self.weights_format!r} is unknown: choose {', '.join(WEIGHTS_FORMATS)}"
            )

    @property
    def kv_memory_bytes(self) -> int:
        """`kv_memory` in bytes."""
        size = self.kv_memory
        if isinstance(size, str):
            return parse_size(size)
        if isinstance(size, bool) or not isinstance(size, int):
            raise UsageError(f"kv_memory is {size!r}: give whole bytes, or text as in 512MiB")
        return size


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}: it must be a whole number, at least 1")
