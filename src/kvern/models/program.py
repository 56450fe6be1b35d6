"""Repeating a step's native operations in one call, where a backend can record them.

A decode step of a small model spends much of its time between operations. A backend that records
(`NativeBackend.recording`) repeats all of them for other tokens in one call, the same operations on the
same buffers, so no bit changes. A recording is used only after it has repeated a step exactly: one of
several rows, and one of a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch
from kvern.models.attention import LayerCache
from kvern.models.config import DecoderConfig, LayerConfig
from kvern.models.workspace import Program, Recorded, Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Recording(Protocol):
    """What a recording ends as; None when some operation cannot be repeated."""

    program: Program | None


class RecordingBackend(Protocol):
    """The part of a backend that records."""

    def recording(
        self, token_ids: I32, batches: Sequence[AttendBatch], max_tokens: int
    ) -> AbstractContextManager[Recording]:
        """See `kvern.kernels.native.NativeBackend.recording`."""
        ...


_FREE_LAYER_FIELDS = (
    "num_heads",
    "num_kv_heads",
    "key_dim",
    "value_dim",
    "scale",
    "intermediate_size",
    "activation",
    "rope",
    "window",
    "chunk",
    "softcap",
    "qk_norm",
    "has_sinks",
    "query_temperature",
    "has_gate",
    "share_with",
    "has_value_norm",
    "keys_are_values",
    "is_gated",
    "latent",
    "state",
    "experts",
    "has_both",
    "has_mixer",
    "has_feed_forward",
)
_FREE_FIELDS = (
    "hidden_size",
    "vocab_size",
    "max_positions",
    "regimes",
    "norm_eps",
    "layers",
    "tie_embeddings",
    "norm",
    "norm_offset",
    "norm_bias",
    "norm_weight",
    "head_bias",
    "is_parallel",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "logit_softcap",
    "num_learned_positions",
    "position_offset",
    "per_layer_size",
    "per_layer_vocab_size",
    "per_layer_activation",
    "has_layer_scale",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
)
"""What may differ from a plain decoder: the backend's operations know it, or it comes after the last one."""


def is_repeatable(config: DecoderConfig) -> bool:
    """Whether a decoder does everything between embedding and final norm by backend operations.

    What numpy adds (parallel streams, gates cut to sparsity) is not recorded. So every
    field that is not known to be harmless must have its default, those of later families included.
    """
    plain_layer, plain = LayerConfig(), DecoderConfig(1, 1, 1, 1.0, (), False)
    return _equal_but_for(config, plain, _FREE_FIELDS) and all(
        _equal_but_for(layer, plain_layer, _FREE_LAYER_FIELDS) for layer in set(config.layers)
    )


def _equal_but_for(config: Any, plain: Any, free: tuple[str, ...]) -> bool:
    return bool(replace(config, **{name: getattr(plain, name) for name in free}) == plain)


class StateCopy:
    """The recurrent states of a step's sequences, kept so that the step can be run again from them."""

    def __init__(self, batches: Sequence[AttendBatch], cache: Sequence[LayerCache]) -> None:
        """Copy them as they are."""
        slabs = {(id(c.state.pages), c.group): c.state.pages for c in cache if c.state is not None}
        self._parts = []
        for (_, group), pages in slabs.items():
            batch = batches[group]
            ids = np.unique(batch.block_tables[np.diff(batch.cu_seqlens_q) > 0])
            ids = ids[ids > 0]
            self._parts.append((pages, ids, pages[ids]))

    def put_back(self) -> None:
        """Overwrite them with the copy."""
        for pages, ids, kept in self._parts:
            pages[ids] = kept

    def is_current(self) -> bool:
        """Whether they are what the copy holds, bit for bit."""
        return all(np.array_equal(pages[ids], kept) for pages, ids, kept in self._parts)


def run_or_repeat(
    backend: RecordingBackend,
    workspace: Workspace,
    token_ids: I32,
    batches: Sequence[AttendBatch],
    cache: Sequence[LayerCache],
    forward: Callable[[], tuple[F32, int]],
) -> tuple[F32, int]:
    """A step by the recorded program if there is one that reaches its positions, else recorded anew.

    Args:
        backend: records; the rows of a step that it repeats are all in the first position regime.
        workspace: keeps the program; its buffers are what the program works on.
        token_ids: int32 ``[T]``.
        batches: one per KV group.
        cache: one per layer.
        forward: runs the step's operations and returns what `Decoder.forward` does.
    """
    recorded = workspace.recorded
    program, num_rows = recorded.program, len(token_ids)
    if program is not None and int(batches[0].positions.max()) < program.max_positions:
        if (num_rows == 1) in recorded.verified:
            products = program.run(token_ids, batches)
            return workspace.rows(num_rows).normed, products
        before = StateCopy(batches, cache)
        result, after = forward(), StateCopy(batches, cache)
        return _verified(recorded, program, token_ids, batches, result, (before, after))
    if recorded.is_refused or num_rows == 1:  # a single row does not show how far rows lie apart
        return forward()
    before = StateCopy(batches, cache)
    with backend.recording(token_ids, batches, workspace.max_tokens) as recording:
        result = forward()
    recorded.verified.clear()
    if recording.program is None:
        recorded.program, recorded.is_refused = None, True
        return result
    after = StateCopy(batches, cache)
    return _verified(recorded, recording.program, token_ids, batches, result, (before, after))


def _verified(
    recorded: Recorded,
    program: Program,
    token_ids: I32,
    batches: Sequence[AttendBatch],
    result: tuple[F32, int],
    states: tuple[StateCopy, StateCopy],
) -> tuple[F32, int]:
    """Repeat a step that has just run operation by operation, and keep the program only if it is equal.

    Done once for steps of one row and once for steps of several. Keys and values are written again, equal;
    states go back to what they were ``(before, after)`` the step.
    """
    hidden, products = result
    before, after = states
    expected = hidden.copy()
    before.put_back()
    again = program.run(token_ids, batches)
    is_equal = (
        again == products
        and after.is_current()
        and bool(np.array_equal(expected.view(np.uint32), hidden.view(np.uint32)))
    )
    after.put_back()
    recorded.program = program if is_equal else None
    recorded.is_refused = not is_equal
    recorded.verified.add(len(token_ids) == 1)
    hidden[...] = expected
    return result
