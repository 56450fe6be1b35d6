"""What the engine modules share: ceilings, stored bytes of a token, assumed reserves."""

from __future__ import annotations

from collections.abc import Callable

from kvern.plan.request import PlanRequest
from kvern.spec.content import Heads, Index, Latent, State
from kvern.spec.layers import ModelSpec

GIB = 2**30

FORMAT_BYTES = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
}
"""Bytes per element of formats without scales per token."""

ALIASES = {
    "f32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "f16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "fp4_e2m1": "nvfp4",
}

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling of a quotient."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above `value`."""
    return cdiv(value, multiple) * multiple


def canonical_format(kv_format: str | None, model_dtype: str | None) -> str:
    """A KV format's one name; "auto" or nothing is the model's own dtype."""
    name = ((kv_format or "").lower().split() or ["auto"])[0]
    if name == "auto":
        name = (model_dtype or "bf16").lower()
    return ALIASES.get(name, name)


def serving_dtype(model: ModelSpec) -> str:
    """The dtype in which GPU engines run a model: its own, fp16 where that is 32 bits."""
    dtype = canonical_format(None, model.torch_dtype)
    return "fp16" if dtype == "fp32" else dtype


def num_elements(content: Heads | Latent | Index) -> int:
    """Stored elements of one entry of one layer."""
    return sum(stream.num_heads * stream.dim for stream in content.streams)


def state_bytes(state: State, part_name: str | None = None) -> int:
    """Bytes of a state, or of its part called `part_name`."""
    return sum(
        part.num_bytes for part in state.parts if part_name is None or part.name == part_name
    )


def activation_reserve(request: PlanRequest, tokens: int, seqs: int, runtime: int) -> int:
    """Assumed peak of activations plus `runtime`, when the user states none.

    Per token in flight: the residual stream four times and the widest feed-forward activation
    twice, in 16 bit; plus logits of `seqs` rows in fp32, once as computed and once as sampled.
    """
    model = request.model
    hidden = model.hidden_size or 0
    wide = model.intermediate_size or 4 * hidden
    if model.experts is not None and model.experts.intermediate_size:
        routed = model.experts.intermediate_size * model.experts.num_experts_per_token
        wide = max(routed, model.intermediate_size or 0)
    per_token = 2 * (4 * hidden + 2 * cdiv(wide, request.tp))
    logits = 2 * 4 * seqs * (model.vocab_size or 0)
    return runtime + tokens * per_token + logits


def largest_fitting(fits: Callable[[int], bool], upper: int) -> int:
    """The largest n in 1..upper with `fits(n)`, which must be monotone; 0 if none."""
    low, high, best = 1, upper, 0
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
