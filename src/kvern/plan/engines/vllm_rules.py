"""vLLM's rules as data: what changed in which version, and what its formats store.

Sources: vLLM's `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py` and `platforms/interface.py`
across versions, its pull requests, and start-up logs that people published.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvern.plan.versions import EngineVersion, Since, rule_at

GRAIN = 16
"""Tokens that attention kernels want a block to be a multiple of."""

MLA_BLOCK = 64
BLOCK_SPARSE_BLOCK = 128
COMPRESSED_BLOCK = 256

BATCHED_TOKENS = (
    (Since(), ((0, 2048), (70, 8192))),
    (Since(release=(0, 28)), ((0, 2048), (70, 8192), (160, 16384))),
)
"""Tokens an API server batches by default: from how many GiB of device memory, how many tokens."""

SMALL_BATCH_DEVICES = ("a100",)
"""Devices that keep the smallest batch whatever their memory."""

TOKENS_PRINT = (
    (Since(), "pool"),
    (Since(release=(0, 21)), "concurrency"),
)
"""What "GPU KV cache size: N tokens" means: num_blocks // groups * block, or concurrency * len."""

HYBRID_MANAGER = (
    (Since(), False),
    (Since(release=(0, 9, 2)), True),
)
"""Whether window layers get their own groups instead of the full length."""

STATE_MODE = (
    (Since(), "none"),
    (Since(release=(0, 21)), "align"),
)
"""States of a request where none is asked for: one, or two as with prefix caching (align).

Up to 0.24 prefix caching of states had to be switched on, and published servers of 0.21 to 0.24
nearly always do; it is assumed on from 0.21."""

BATCHES_IN_FLIGHT = (
    (Since(), 1),
    (Since(release=(0, 26)), 2),
)
"""Batches whose tokens a window layer must hold: asynchronous scheduling keeps two at once.

With two batches at once, stages of a pipeline hold one each, if there are more than two of them."""

LATENT_STORED = (
    (Since(), False),
    (Since(release=(0, 7, 1)), True),
)
"""Whether an MLA latent is stored as such; before, full heads padded to 256 elements were."""

EXPANDED_HEAD_DIM = 256

ADMISSION = (
    (Since(), "layers"),
    (Since(release=(0, 14)), "all-stages"),
    (Since(release=(0, 16)), "stage"),
)
"""Start-up check: sum over a stage's layers; all stages' layers on each rank; a stage's groups."""

NULL_BLOCK_IN_ADMISSION = (
    (Since(), False),
    (Since(release=(0, 33)), True),
)

GRAPHS_IN_BUDGET = (
    (Since(), False),
    (Since(release=(0, 21)), True),
)
"""Whether CUDA-graph memory is taken from the budget."""

UTILIZATION = (
    (Since(), 0.9),
    (Since(release=(0, 21)), 0.92),
)

V0_ENGINE_BEFORE = (0, 8)
"""Before this release the V0 engine ran by default; a version text may also say "(V0)"."""

RUNTIME_RESERVE = 2**30
GRAPH_RESERVE = 2**30
"""Assumed: driver context, workspaces and communication buffers; CUDA graphs."""

# ------------------------------------------------------------------------------ stored formats

PACKED_SCALE_GROUP = 128
PACKED_ROPE_DIM = 64
"""fp8_ds_mla: fp8 latent, an fp32 scale per 128 of it, the rotary key in bf16: 656 B for 512+64.
The record has room for 64 rotary elements even where a model has none."""

INDEX_SCALE_BYTES = 4
"""Index keys beside a latent are fp8 with one fp32 scale per 128: 132 B for 128."""

POOLED_KEYS = 4
POOLED_KEY_BYTES = 2
"""Index keys of sparse attention beside recurrent states: four are pooled into one, in bf16."""

EXPANDED_LATENT_FAMILIES = ("minicpm3",)
"""Families whose latent vLLM expands to ordinary attention, values padded to the keys' width."""

COMPRESSED_ENTRY_BYTES = 584
"""DeepSeek-V4: 448 fp8 + 64 bf16 rotary + 8 scales, per entry."""

COMPRESSED_ALIGNMENT = 576
COMPRESSED_WINDOW_BLOCK = 64

OVERLAPPING_RATIO = 4
"""A compressor of this ratio looks back over two groups of tokens instead of one."""

COMPRESSOR_BLOCK = {4: 4}
COMPRESSOR_BLOCK_DEFAULT = 8
"""Tokens per block of a compressor's state, by compression ratio."""


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """A packed format of K and V per token and head: bits, extra bytes, elements per fp8 scale."""

    key_bits: int
    value_bits: int
    key_extra: int
    value_extra: int
    scale_group: int = 0

    def slot_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one head's K and V of one token, rounded up to an even number."""
        key = ceil(key_dim * self.key_bits / 8) + self.key_extra
        value = ceil(value_dim * self.value_bits / 8) + self.value_extra
        if self.scale_group:
            key += ceil(key_dim / self.scale_group)
            value += ceil(value_dim / self.scale_group)
        return (key + value + 1) // 2 * 2


PACKED_HEADS = {
    "turboquant_k8v4": PackedHeads(8, 4, 0, 4),
    "turboquant_4bit_nc": PackedHeads(4, 4, 2, 4),
    "turboquant_k3v4_nc": PackedHeads(3, 4, 2, 4),
    "turboquant_3bit_nc": PackedHeads(3, 3, 2, 4),
    "nvfp4": PackedHeads(4, 4, 0, 0, scale_group=16),
    "int8_per_token_head": PackedHeads(8, 8, 4, 4),
    "fp8_per_token_head": PackedHeads(8, 8, 4, 4),
    "int4_per_token_head": PackedHeads(4, 4, 4, 4),
}
"""Scale, norm and zero point lie beside each packed vector."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one version."""

    is_v0: bool
    latent_stored: bool
    tokens_print: str
    hybrid_manager: bool
    state_mode: str
    batches_in_flight: int
    batched_tokens: tuple[tuple[int, int], ...]
    admission: str
    null_block_in_admission: bool
    graphs_in_budget: bool
    utilization: float


def rules_of(version: EngineVersion) -> Rules:
    """The rules that hold in `version`."""
    is_v0 = "(v0)" in version.text.lower() or (
        bool(version.release) and version.release < V0_ENGINE_BEFORE
    )
    return Rules(
        is_v0=is_v0,
        latent_stored=rule_at(LATENT_STORED, version),
        tokens_print="pool" if is_v0 else rule_at(TOKENS_PRINT, version),
        hybrid_manager=not is_v0 and rule_at(HYBRID_MANAGER, version),
        state_mode=rule_at(STATE_MODE, version),
        batches_in_flight=rule_at(BATCHES_IN_FLIGHT, version),
        batched_tokens=rule_at(BATCHED_TOKENS, version),
        admission=rule_at(ADMISSION, version),
        null_block_in_admission=rule_at(NULL_BLOCK_IN_ADMISSION, version),
        graphs_in_budget=rule_at(GRAPHS_IN_BUDGET, version),
        utilization=rule_at(UTILIZATION, version),
    )
