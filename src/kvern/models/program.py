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
)
_FREE_FIELDS = (
    "hidden_size",
    "vocab_size",
    "max_positions",
    "regimes",
    "norm_eps",
    "layers",
    "tie_embeddings",
    "norm_offset",
    "head_bias",
    "logit_scale",
    "logit_softcap",
)
"""What may differ from a plain decoder: the backend's operations know it, or it comes after the last one."""


def is_repeatable(config: DecoderConfig) -> bool:
    """Whether a decoder does everything between embedding and final norm by backend operations.

    What numpy adds (biases, factors, routing to experts, states, ...) is not recorded. So every field
    that is not known to be harmless must have its default, those of later families included.
    """
    plain_layer, plain = LayerConfig(), DecoderConfig(1, 1, 1, 1.0, (), False)
    return _equal_but_for(config, plain, _FREE_FIELDS) and all(
        _equal_but_for(layer, plain_layer, _FREE_LAYER_FIELDS) for layer in set(config.layers)
    )


def _equal_but_for(config: Any, plain: Any, free: tuple[str, ...]) -> bool:
    return bool(replace(config, **{name: getattr(plain, name) for name in free}) == plain)


def run_or_repeat(
    backend: RecordingBackend,
    workspace: Workspace,
    token_ids: I32,
    batches: Sequence[AttendBatch],
    forward: Callable[[], tuple[F32, int]],
) -> tuple[F32, int]:
    """A step by the recorded program if there is one that reaches its positions, else recorded anew.

    Args:
        backend: records; the rows of a step that it repeats are all in the first position regime.
        workspace: keeps the program; its buffers are what the program works on.
        token_ids: int32 ``[T]``.
        batches: one per KV group.
        forward: runs the step's operations and returns what `Decoder.forward` does.
    """
    recorded = workspace.recorded
    program, num_rows = recorded.program, len(token_ids)
    if program is not None and int(batches[0].positions.max()) < program.max_positions:
        if (num_rows == 1) in recorded.verified:
            products = program.run(token_ids, batches)
            return workspace.rows(num_rows).normed, products
        return _verified(recorded, program, token_ids, batches, forward())
    if recorded.is_refused or num_rows == 1:  # a single row does not show how far rows lie apart
        return forward()
    with backend.recording(token_ids, batches, workspace.max_tokens) as recording:
        result = forward()
    recorded.verified.clear()
    if recording.program is None:
        recorded.program, recorded.is_refused = None, True
        return result
    return _verified(recorded, recording.program, token_ids, batches, result)


def _verified(
    recorded: Recorded,
    program: Program,
    token_ids: I32,
    batches: Sequence[AttendBatch],
    result: tuple[F32, int],
) -> tuple[F32, int]:
    """Repeat a step that has just run operation by operation, and keep the program only if it is equal.

    Done once for steps of one row and once for steps of several. Keys and values are written again, equal.
    """
    hidden, products = result
    expected = hidden.copy()
    again = program.run(token_ids, batches)
    is_equal = again == products and bool(
        np.array_equal(expected.view(np.uint32), hidden.view(np.uint32))
    )
    recorded.program = program if is_equal else None
    recorded.is_refused = not is_equal
    recorded.verified.add(len(token_ids) == 1)
    hidden[...] = expected
    return result
