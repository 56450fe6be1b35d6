"""What a step was bound by, and how near it came to the machine's limits.

Every native call's measured time goes to one party. A matrix product waits for its weights when
reading them at the measured bandwidth takes longer than its arithmetic at the measured rate, and for
arithmetic otherwise; attention waits for keys and values in the same sense. What is neither matrix
product nor attention is a small operation. The rest of a step is Python: bookkeeping (plan and
commit), sampling, and the decoder's own lines.

The bound of a step is the time that no engine on this machine can beat: it must read the weights
once and each sequence's visible keys and values once, and do the arithmetic, the two overlapping at
best:  max(bytes / bandwidth, operations / rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvern.bench.limits import Limits
from kvern.bench.recording import Call, Step
from kvern.spec.codec import KV_FORMATS

PARTIES = (
    "weight reads",
    "KV reads",
    "arithmetic",
    "small operations",
    "bookkeeping",
    "sampling",
    "Python in the decoder",
)
PYTHON_PARTIES = ("bookkeeping", "sampling", "Python in the decoder")


@dataclass(slots=True)
class Phase:
    """Some steps together.

    Attributes:
        steps: how many.
        tokens: rows that went through the decoder.
        seconds: measured, without what recording cost.
        bound_s: the least that the machine's limits allow.
        parts_s: seconds by party; they add up to `seconds`.
        weight_bytes: read at least.
        kv_bytes: read at least.
        operations: multiplications and additions in matrix products and attention.
        native_calls: operations of the backend.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bound_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTIES, 0.0))
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    operations: float = 0.0
    native_calls: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON: totals, and the share of each party."""
        total = sum(self.parts_s.values())
        shares = {name: s / total if total else 0.0 for name, s in self.parts_s.items()}
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bound_s": self.bound_s,
            "shares": shares,
            "python_share": sum(shares[name] for name in PYTHON_PARTIES),
            "bottleneck": max(shares, key=lambda name: shares[name]) if total else None,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "operations": self.operations,
            "native_calls": self.native_calls,
        }


@dataclass(frozen=True, slots=True)
class Accountant:
    """Turns recorded steps into phases.

    Attributes:
        limits: of the machine.
        kv_format: of the engine.
        stored_weight_bytes: of the file; a packed copy in memory may be larger.
        overhead_per_call_s: what recording a call costs.
    """

    limits: Limits
    kv_format: str
    stored_weight_bytes: int
    overhead_per_call_s: float

    def phases(self, steps: Sequence[Step]) -> dict[str, Phase]:
        """``prefill`` (steps with prompt tokens), ``decode`` (one token per sequence) and ``all``."""
        phases = {name: Phase() for name in ("prefill", "decode", "all")}
        for step in steps:
            counted = self._count(step)
            is_decode = _num_rows(step) == _num_sequences(step)
            for name in ("decode" if is_decode else "prefill", "all"):
                _add(phases[name], counted)
        return phases

    def _count(self, step: Step) -> Phase:
        phase = Phase(steps=1, tokens=_num_rows(step), native_calls=len(step.calls))
        weights: dict[int, int] = {}
        arithmetic_s = 0.0
        for call in step.calls:
            seconds = call.ended_s - call.started_s
            if call.name == "matmul":
                read_s, compute_s, operations = self._matmul(call, weights)
                party = "weight reads" if read_s >= compute_s else "arithmetic"
            elif call.name.startswith("attend"):
                read_s, compute_s, operations = self._attend(call, phase)
                party = "KV reads" if read_s >= compute_s else "arithmetic"
            else:
                compute_s, operations, party = 0.0, 0.0, "small operations"
            phase.parts_s[party] += seconds
            phase.operations += operations
            arithmetic_s += compute_s
        phase.weight_bytes = float(min(sum(weights.values()), self.stored_weight_bytes))
        read_s = (phase.weight_bytes + phase.kv_bytes) / self.limits.read_bytes_per_s
        phase.bound_s = max(read_s, arithmetic_s)
        self._python(step, phase)
        return phase

    def _python(self, step: Step, phase: Phase) -> None:
        """What is left of the step once the native calls, and their recording, are taken off."""
        in_forward = [call for call in step.calls if not _is_head(call, step)]
        forward_s = sum(call.ended_s - call.started_s for call in in_forward)
        head_s = sum(call.ended_s - call.started_s for call in step.calls) - forward_s
        recording_s = self.overhead_per_call_s * len(in_forward)
        rest = {
            "Python in the decoder": step.forward_s - forward_s - recording_s,
            "sampling": step.execute_s - step.forward_s - head_s,
            "bookkeeping": step.seconds - step.execute_s,
        }
        for name, seconds in rest.items():
            phase.parts_s[name] += max(0.0, seconds)
        phase.seconds = sum(phase.parts_s.values())

    def _matmul(self, call: Call, weights: dict[int, int]) -> tuple[float, float, float]:
        x, weight = call.args[0], call.args[1]
        num_bytes = int(getattr(weight, "nbytes_owned", 0)) or weight.rows * weight.cols
        weights[id(weight)] = num_bytes
        operations = 2.0 * x.shape[0] * weight.rows * weight.cols
        rate = self.limits.arithmetic(_arithmetic_kind(num_bytes / (weight.rows * weight.cols)))
        return num_bytes / self.limits.read_bytes_per_s, operations / rate, operations

    def _attend(self, call: Call, phase: Phase) -> tuple[float, float, float]:
        q, keys, values, batch, params = call.args[:5]
        k_codec, v_codec = KV_FORMATS[self.kv_format]
        visible = _visible_keys(batch, params)
        num_bytes = float(
            k_codec.stored_bytes(visible, keys.num_heads, keys.dim)
            + v_codec.stored_bytes(visible, values.num_heads, values.dim)
        )
        phase.kv_bytes += num_bytes
        pairs = call.result if isinstance(call.result, int) else 0
        operations = 2.0 * pairs * q.shape[1] * (keys.dim + values.dim)
        rate = self.limits.arithmetic("fp32" if self.kv_format == "fp32" else "bf16")
        return num_bytes / self.limits.read_bytes_per_s, operations / rate, operations


def _arithmetic_kind(bytes_per_element: float) -> str:
    """Quantised weights multiply as int8, two-byte ones as bfloat16, wider ones as float32."""
    if bytes_per_element < 1.5:
        return "int8"
    return "bf16" if bytes_per_element < 3 else "fp32"


def _visible_keys(batch: Any, params: Any) -> int:
    """Keys that at least one query of each sequence sees, summed over the sequences."""
    lengths = np.asarray(batch.seq_lens, np.int64)
    if params.window is None:
        return int(lengths.sum())
    queries = np.diff(np.asarray(batch.cu_seqlens_q, np.int64))
    return int(np.minimum(lengths, params.window + queries - 1 + params.num_sink_tokens).sum())


def _num_rows(step: Step) -> int:
    return next((len(call.args[1]) for call in step.calls if call.name == "embed"), 0)


def _num_sequences(step: Step) -> int:
    for call in step.calls:
        if call.name.startswith("attend"):
            return len(call.args[3].seq_lens)
    return 0


def _is_head(call: Call, step: Step) -> bool:
    """Whether a call is the output head's: it comes after the decoder's forward has ended."""
    return call is step.calls[-1] and call.name == "matmul"


def _add(phase: Phase, counted: Phase) -> None:
    phase.steps += counted.steps
    phase.tokens += counted.tokens
    phase.seconds += counted.seconds
    phase.bound_s += counted.bound_s
    phase.weight_bytes += counted.weight_bytes
    phase.kv_bytes += counted.kv_bytes
    phase.operations += counted.operations
    phase.native_calls += counted.native_calls
    for name, seconds in counted.parts_s.items():
        phase.parts_s[name] += seconds
