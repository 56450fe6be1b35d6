"""Cache faults to order: each breaks an engine the way that real engines were broken.

Nothing in the product uses this package but the doctor's proof that it sees what it claims to see. Every
fault is a function that takes an engine which was just made and wraps one of its parts: give it to
`kvern.check.doctor.check` as ``tamper``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvern.check.faults import blocks, computing, fooling, sharing
from kvern.check.names import Fault
from kvern.engine.llm import LLM

__all__ = ["INJECTIONS", "Injection"]


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault to order.

    Attributes:
        tamper: puts it in.
        fault: the name it must be given.
        is_inside_kernels: the doctor can only see its effect on logits, never its cause.
    """

    tamper: Callable[[LLM], None]
    fault: Fault
    is_inside_kernels: bool = False


INJECTIONS: dict[str, Injection] = {
    "restart_positions_at_chunks": Injection(
        computing.restart_positions_at_chunks, Fault.POSITIONS
    ),
    "restart_positions_at_decode": Injection(
        computing.restart_positions_at_decode, Fault.POSITIONS
    ),
    "top_left_mask": Injection(computing.top_left_mask, Fault.MASK, is_inside_kernels=True),
    "noise_everywhere": Injection(
        computing.noise_everywhere, Fault.RANDOMNESS, is_inside_kernels=True
    ),
    "noise_in_batches": Injection(
        computing.noise_in_batches, Fault.RANDOMNESS, is_inside_kernels=True
    ),
    "batch_dependent_rounding": Injection(
        computing.batch_dependent_rounding, Fault.ROUNDING, is_inside_kernels=True
    ),
    "repeat_recordings_wrongly": Injection(
        computing.repeat_recordings_wrongly, Fault.RECORDING, is_inside_kernels=True
    ),
    "table_points_at_neighbour": Injection(blocks.table_points_at_neighbour, Fault.WRONG_PREFIX),
    "hit_of_another_prefix": Injection(blocks.hit_of_another_prefix, Fault.WRONG_PREFIX),
    "free_while_used": Injection(blocks.free_while_used, Fault.BLOCK_OWNER),
    "write_into_sealed": Injection(blocks.write_into_sealed, Fault.BLOCK_OWNER),
    "leak_blocks": Injection(blocks.leak_blocks, Fault.LEAK),
    "skip_last_token": Injection(sharing.skip_last_token, Fault.LAST_TOKEN),
    "copy_tail_too_far": Injection(sharing.copy_tail_too_far, Fault.TAIL_TOO_FAR),
    "claim_unwritten": Injection(sharing.claim_unwritten, Fault.UNWRITTEN),
    "resume_without_recomputing": Injection(sharing.resume_without_recomputing, Fault.TOKENS_LOST),
    "forget_generated_token": Injection(sharing.forget_generated_token, Fault.TOKENS_LOST),
    "write_into_sibling": Injection(sharing.write_into_sibling, Fault.FORK),
    "ignore_salt": Injection(sharing.ignore_salt, Fault.SALT),
    "only_nan": Injection(fooling.only_nan, Fault.NOT_FINITE),
    "always_the_same": Injection(fooling.always_the_same, Fault.DEGENERATE),
    "blind_to_the_past": Injection(fooling.blind_to_the_past, Fault.DEGENERATE),
    "refuses_everything": Injection(fooling.refuses_everything, Fault.NO_RESULT),
    "never_advances": Injection(fooling.never_advances, Fault.NO_RESULT),
}
"""Every fault to order, by name."""
