"""Bounds on time: what bandwidth and arithmetic allow at best. Bounds, not promises.

A decode step reads the weights once and each request's live cache once, and computes two operations
per active parameter and request plus the attention. The larger of the two times is the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.plan.devices import Device
from kvern.plan.request import PlanRequest
from kvern.plan.shards import rank_model
from kvern.plan.weights import total_parameters, weight_bits
from kvern.spec.codec import KV_FORMATS
from kvern.spec.content import Heads, Latent
from kvern.spec.layers import ModelSpec

SSD_BANDWIDTH = 7e9
"""Assumed sequential read of one NVMe drive, bytes per second."""

MAX_BATCH = 2**20


@dataclass(frozen=True, slots=True)
class DecodeBound:
    """One decode step of a batch, per device.

    Attributes:
        weight_bytes, kv_bytes: read per step.
        flops: operations per step.
        memory_s, compute_s: the two times; `step_s` is the larger.
        token_bytes: what one more output token adds to a request's cache on one rank.
        turning_batch: the smallest batch whose step is bound by arithmetic; None = no batch is,
            because the cache that is read grows with it.
        kv_fits_on_chip: whether a step's cache fits the on-die cache; None = size unknown.
    """

    batch: int
    context: int
    weight_bytes: int
    kv_bytes: int
    flops: float
    memory_s: float
    compute_s: float
    peak_flops: float
    bandwidth: float
    turning_batch: int | None
    cache_bytes: int | None
    token_bytes: int

    @property
    def step_s(self) -> float:
        """The bound on one step, hence on the time per token of each request."""
        return max(self.memory_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        """Which of the two times is the longer: bandwidth or arithmetic."""
        return "bandwidth" if self.memory_s >= self.compute_s else "arithmetic"

    @property
    def tokens_per_s(self) -> float:
        """Bound on the batch's tokens per second."""
        return self.batch / self.step_s

    @property
    def kv_fits_on_chip(self) -> bool | None:
        """Whether the cache of a step fits the largest on-die cache."""
        return None if self.cache_bytes is None else self.kv_bytes <= self.cache_bytes

    def to_json(self) -> dict[str, object]:
        """The figures as `plan --json` prints them under "bound"."""
        return {
            "batch": self.batch,
            "context": self.context,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "flops": self.flops,
            "memory_s": self.memory_s,
            "compute_s": self.compute_s,
            "step_s": self.step_s,
            "bound_by": self.bound_by,
            "tokens_per_s": self.tokens_per_s,
            "bytes_per_output_token": self.token_bytes,
            "compute_bound_from_batch": self.turning_batch,
            "on_chip_cache_bytes": self.cache_bytes,
            "kv_fits_on_chip": self.kv_fits_on_chip,
        }


@dataclass(frozen=True, slots=True)
class OffloadBound:
    """Loading a prefix's cache against computing it again.

    Attributes:
        recompute_s: bound on the prefill of the prefix.
        load_s: by source ("ram", "ssd"): seconds to bring its bytes to the device.
        faster_from: by source: the length from which loading is faster; 0 = always,
            None = at no length of the model.
    """

    num_tokens: int
    kv_bytes: int
    recompute_s: float
    load_s: dict[str, float]
    faster_from: dict[str, int | None]


def peak_flops(device: Device, bits: float) -> tuple[float, str]:
    """The device's dense peak for weights of `bits`, and the format it is for.

    Raises:
        UsageError: the catalogue has no arithmetic rate for the device.
    """
    if bits <= 8 and "fp8" in device.flops:
        return device.flops["fp8"], "fp8"
    if "bf16" not in device.flops:
        raise UsageError(
            f"the catalogue has no arithmetic rate for {device.name}: a time bound needs one, so "
            "ask for capacity only or name another device"
        )
    return device.flops["bf16"], "bf16"


def decode_bound(
    request: PlanRequest, device: Device, batch: int, context: int, weight_bytes: int
) -> DecodeBound:
    """The bound on a step of `batch` requests of `context` tokens, on each device.

    Args:
        request: model, formats and parallel degrees.
        device: bandwidth and arithmetic.
        batch: requests in the step.
        context: tokens that each of them has.
        weight_bytes: weights of one rank.

    Raises:
        UsageError: no arithmetic rate, or parameters that cannot be counted.
    """
    bits, _ = weight_bits(request.weights_format, request.model)
    peak, _ = peak_flops(device, bits)
    kv_each = step_kv_bytes(request, context)

    def times(requests: int) -> tuple[float, float, int, float]:
        read = read_weight_bytes(request.model, requests, weight_bytes)
        work = requests * token_flops(request.model, context) / request.num_ranks
        memory = (read + requests * kv_each) / device.bandwidth
        return memory, work / peak, read, work

    memory_s, compute_s, read, work = times(batch)
    return DecodeBound(
        batch=batch,
        context=context,
        weight_bytes=read,
        kv_bytes=batch * kv_each,
        flops=work,
        memory_s=memory_s,
        compute_s=compute_s,
        peak_flops=peak,
        bandwidth=device.bandwidth,
        turning_batch=_turning(lambda b: times(b)[:2]),
        cache_bytes=device.cache_bytes,
        token_bytes=step_kv_bytes(request, context + 1) - kv_each,
    )


def _turning(times: Callable[[int], tuple[float, float]]) -> int | None:
    """The smallest batch with arithmetic above bandwidth, by doubling and bisection."""
    high = 1
    while high <= MAX_BATCH:
        memory, compute = times(high)
        if compute >= memory:
            break
        high *= 2
    else:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        memory, compute = times(middle)
        low, high = (low, middle) if compute >= memory else (middle, high)
    return high


def step_kv_bytes(request: PlanRequest, context: int) -> int:
    """Bytes of one request's live cache that a step reads on one rank."""
    model = request.model.with_kv_format(spec_format(request))
    part = rank_model(model, request.tp, tuple(range(model.num_layers)))
    return part.context_bytes(context) // (request.pp * request.dcp)


def spec_format(request: PlanRequest) -> str:
    """The nearest of kvern's own format names to what an engine calls its format."""
    from_engines = {
        "auto": "bf16", "f16": "fp16", "f32": "fp32", "float16": "fp16", "bfloat16": "bf16",
        "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_ds_mla": "fp8", "q8_0": "int8", "q4_0": "int4",
        "float": "fp32", "half": "fp16",
    }  # fmt: skip
    name = (request.kv_format or "auto").lower()
    known = from_engines.get(name, name)
    if request.engine.lower() == "kvern" or known in KV_FORMATS:
        return known
    return "int4" if "4" in known or "3" in known else "bf16"


def read_weight_bytes(model: ModelSpec, batch: int, weight_bytes: int) -> int:
    """Weights that a step of `batch` tokens touches: an expert only if some token chose it.

    With E experts of which a token uses k, a step of b tokens touches E·(1 - (1 - k/E)^b) of them
    when choices are even and independent. Of an input embedding that is no head as well, a step
    reads a row for each token.
    """
    counts, experts = model.parameters, model.experts
    if counts is None:
        return weight_bytes
    untouched = 0.0
    if counts.lm_head and model.vocab_size:
        untouched = counts.embedding * max(1 - batch / model.vocab_size, 0)
    if experts is not None and experts.num_experts and all(x.parameters for x in model.layers):
        routed = sum(x.parameters.experts for x in model.layers if x.parameters is not None)
        untouched += routed * (1 - experts.num_experts_per_token / experts.num_experts) ** batch
    return int(weight_bytes * (counts.total - untouched) / counts.total)


def token_flops(model: ModelSpec, context: int) -> float:
    """Operations for one token at position `context`: weights and attention.

    Raises:
        UsageError: the parameters cannot be counted.
    """
    active = _active_parameters(model)
    return 2.0 * active + attention_flops(model, context)


def attention_flops(model: ModelSpec, context: int) -> float:
    """Operations of one query against `context` tokens: scores and weighted sum."""
    heads = model.num_attention_heads or model.num_kv_heads or 0
    total = 0
    for layer in model.layers:
        for cache in layer.caches:
            seen = cache.reach.max_visible(context) // cache.stride
            if isinstance(cache.content, Heads):
                total += 2 * heads * seen * (cache.content.key_dim + cache.content.value_dim)
            elif isinstance(cache.content, Latent):
                latent = cache.content
                total += 2 * heads * seen * (2 * latent.latent_dim + latent.rope_dim)
    return float(total)


def prefill_s(request: PlanRequest, device: Device, num_tokens: int) -> float:
    """Bound on computing a prompt of `num_tokens` alone: arithmetic at the dense peak."""
    model = request.model
    bits, _ = weight_bits(request.weights_format, model)
    peak, _ = peak_flops(device, bits)
    # a causal prompt sees half its length on average
    work = num_tokens * (2.0 * _active_parameters(model) + attention_flops(model, num_tokens) / 2)
    return work / (peak * request.num_ranks)


def offload_bound(
    request: PlanRequest, device: Device, num_tokens: int, ssd_bandwidth: float = SSD_BANDWIDTH
) -> OffloadBound:
    """When is loading a prefix's cache faster than computing it again?"""
    sources = {"ram": device.host_bandwidth or 0.0, "ssd": ssd_bandwidth}
    if device.unified_memory or device.is_cpu:
        sources["ram"] = device.bandwidth
    limit = request.model.max_model_len or 2**20

    def load_s(length: int, bandwidth: float) -> float:
        # ranks load in parallel over their own links; an SSD is shared
        shared = request.num_ranks if bandwidth == ssd_bandwidth else 1
        return step_kv_bytes(request, length) * shared / bandwidth

    loads = {name: load_s(num_tokens, rate) for name, rate in sources.items() if rate}
    faster: dict[str, int | None] = {}
    for name, rate in sources.items():
        if rate:
            faster[name] = _first_faster(request, device, lambda n, r=rate: load_s(n, r), limit)  # type: ignore[misc]
    return OffloadBound(
        num_tokens=num_tokens,
        kv_bytes=step_kv_bytes(request, num_tokens) * request.num_ranks,
        recompute_s=prefill_s(request, device, num_tokens),
        load_s=loads,
        faster_from=faster,
    )


def _first_faster(
    request: PlanRequest, device: Device, load_s: Callable[[int], float], limit: int
) -> int | None:
    def loads_faster(length: int) -> bool:
        return load_s(length) <= prefill_s(request, device, length)

    if not loads_faster(limit):
        return None
    if loads_faster(1):
        return 0
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if loads_faster(middle) else (middle, high)
    return high


def _active_parameters(model: ModelSpec) -> int:
    if model.parameters is not None:
        return model.parameters.active
    named = total_parameters(model)
    if named is None:
        missing = ", ".join(model.missing_fields) or "the widths of its layers"
        raise UsageError(
            f"the configuration of {model.name} lacks {missing}, so its operations per token "
            "cannot be counted"
        )
    return named
