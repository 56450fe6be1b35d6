"""What a step was bound by, and how near it came to the machine's limits.

Every native call's measured time goes to one party. A matrix product waits for its weights when
reading them at the measured bandwidth takes longer than its arithmetic at the measured rate, and for
arithmetic otherwise; attention waits for keys and values in the same sense. What is neither matrix
product nor attention is a small operation. The rest of a step is Python: bookkeeping (plan and
commit), sampling, and the decoder's own lines. An engine whose calls are timed cannot repeat a
recorded step in one call, so a second run, whose calls are not timed, tells what the decoder's lines
really cost.

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

DECODER = "Python in the decoder"
NATIVE_PARTIES = ("weight reads", "KV reads", "arithmetic", "small operations")
PYTHON_PARTIES = ("bookkeeping", "sampling", DECODER)
PARTIES = NATIVE_PARTIES + PYTHON_PARTIES
PHASES = ("prefill", "decode", "all")


@dataclass(slots=True)
class Phase:
    """Some steps together.

    Attributes:
        steps: how many.
        tokens: rows that went through the decoder.
        seconds: measured, less the Python that an untouched run does not spend.
        bound_s: the least that the machine's limits allow.
        parts_s: seconds by party; they add up to `seconds`.
        weight_bytes: read at least.
        kv_bytes: read at least.
        operations: multiplications and additions in matrix products and attention.
        native_calls: operations of the backend.
        attend_s: seconds of the attention calls alone.
        head_s: seconds of the output head, which comes after the decoder.
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
    attend_s: float = 0.0
    head_s: float = 0.0

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
            "attend_s": self.attend_s,
            "attend_bytes_per_s": self.kv_bytes / self.attend_s if self.attend_s else None,
        }


@dataclass(frozen=True, slots=True)
class Accountant:
    """Turns recorded steps into phases.

    Attributes:
        limits: of the machine.
        kv_format: of the engine.
        stored_weight_bytes: of the file; a packed copy in memory may be larger.
    """

    limits: Limits
    kv_format: str
    stored_weight_bytes: int

    def phases(self, timed: Sequence[Step], untouched: Sequence[Step]) -> dict[str, Phase]:
        """``prefill`` (steps with prompt tokens), ``decode`` (one token per sequence) and ``all``.

        Args:
            timed: steps of a run whose calls were timed.
            untouched: those of a run of equal shape whose calls were not.
        """
        phases = {name: Phase() for name in PHASES}
        for step in timed:
            counted = self._count(step)
            for name in _phases_of(step):
                _add(phases[name], counted)
        for name, phase in phases.items():
            _limit_python(phase, [step for step in untouched if name in _phases_of(step)])
        return phases

    def _count(self, step: Step) -> Phase:
        """One step whose calls were timed."""
        phase = Phase(steps=1, tokens=step.num_tokens, native_calls=len(step.calls))
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
                phase.attend_s += seconds
            else:
                compute_s, operations, party = 0.0, 0.0, "small operations"
            phase.parts_s[party] += seconds
            phase.operations += operations
            arithmetic_s += compute_s
        phase.head_s = _head_s(step)
        native_s = sum(phase.parts_s.values())
        phase.parts_s[DECODER] = max(0.0, step.forward_s - (native_s - phase.head_s))
        phase.parts_s["sampling"] = max(0.0, step.execute_s - step.forward_s - phase.head_s)
        phase.parts_s["bookkeeping"] = max(0.0, step.seconds - step.execute_s)
        phase.weight_bytes = float(min(sum(weights.values()), self.stored_weight_bytes))
        read_s = (phase.weight_bytes + phase.kv_bytes) / self.limits.read_bytes_per_s
        phase.bound_s = max(read_s, arithmetic_s)
        return phase

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


def _phases_of(step: Step) -> tuple[str, str]:
    return "decode" if step.num_tokens == step.num_sequences else "prefill", "all"


def _head_s(step: Step) -> float:
    """Seconds of the output head, whose matrix product comes after the decoder's forward has ended."""
    last = step.calls[-1] if step.calls else None
    return last.ended_s - last.started_s if last is not None and last.name == "matmul" else 0.0


def _limit_python(phase: Phase, untouched: Sequence[Step]) -> None:
    """Take off the decoder's Python what an untouched run does not spend.

    Going through operations one by one is the most that it can cost; the untouched run's forward time
    beside the native calls is what it does cost. The lesser counts, so that a slower second run does
    not look like Python.
    """
    native_s = sum(phase.parts_s[name] for name in NATIVE_PARTIES) - phase.head_s
    forward_s = sum(step.forward_s for step in untouched)
    spent_s = phase.parts_s[DECODER]
    if untouched:
        phase.parts_s[DECODER] = min(spent_s, max(0.0, forward_s - native_s))
    phase.seconds = sum(phase.parts_s.values())


def _add(phase: Phase, counted: Phase) -> None:
    phase.steps += counted.steps
    phase.tokens += counted.tokens
    phase.bound_s += counted.bound_s
    phase.weight_bytes += counted.weight_bytes
    phase.kv_bytes += counted.kv_bytes
    phase.operations += counted.operations
    phase.native_calls += counted.native_calls
    phase.attend_s += counted.attend_s
    phase.head_s += counted.head_s
    for name, seconds in counted.parts_s.items():
        phase.parts_s[name] += seconds
