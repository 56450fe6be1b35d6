"""What people get wrong, said in time: warnings, and the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvern.plan.devices import load_devices
from kvern.plan.request import PlanRequest
from kvern.plan.result import Plan
from kvern.plan.weights import WEIGHT_BITS, weight_bits
from kvern.spec.budget import format_size
from kvern.spec.codec import STORED_CODECS, parse_kv_format, stored_formats
from kvern.spec.content import Heads, Latent
from kvern.spec.layers import ModelSpec

NARROW_WEIGHTS = ("fp8", "int8", "int4", "nvfp4", "mxfp4", "q4_0", "q4_k_m", "q5_k_m", "q8_0")


def warnings_for(answer: Plan) -> tuple[str, ...]:
    """Warnings about an answer, most important first."""
    request, model = answer.request, answer.request.model
    found: list[str] = []
    if not answer.allocation.fits:
        found.append(
            f"one request of {answer.context:,} tokens does not fit: it needs "
            f"{format_size(answer.allocation.bytes_for_context)}; the longest that fits has "
            f"{answer.max_model_len:,} tokens"
        )
    limit = model.max_model_len
    if limit is not None and request.context is not None and request.context > limit:
        found.append(
            f"{request.context:,} tokens are asked for and the model's own limit is {limit:,}: "
            "beyond it positions were never trained"
        )
    found += _positions(answer)
    found += _replication(request, model)
    found += _formats(request)
    found += _memory(request)
    if answer.allocation.fits and answer.allocation.max_concurrency < 2 and request.context is None:
        found.append(
            "one request at the model's full length fills most of the pool: give the length your "
            "requests really reach with --context, output included"
        )
    return tuple(found)


def batch_warnings(answer: Plan, batch: int) -> tuple[str, ...]:
    """Warnings about a number of requests at once that was asked for."""
    at_once = answer.allocation.max_concurrency
    fitting = f"{int(at_once * 100) / 100:,.2f}"
    found: list[str] = []
    if batch > at_once:
        found.append(
            f"a batch of {batch:,} requests of {answer.context:,} tokens is more than the "
            f"{fitting} that fit at once"
        )
    per_token = round(answer.request_cost[1])
    if batch == 1 and at_once >= 2 and per_token:
        found.append(
            f"a batch of 1 hides growth: each output token adds {format_size(per_token)} to every "
            f"request, and {fitting} of {answer.context:,} tokens, output included, fit at once"
        )
    return tuple(found)


def _positions(answer: Plan) -> list[str]:
    """Lengths at which every token costs a pass over its whole sequence."""
    regimes, engine = answer.request.model.regimes, answer.request.engine.lower()
    if regimes is None or not regimes.is_brief or engine != "kvern":
        return []
    if answer.context <= regimes.border:
        return []
    return [
        f"past {regimes.border:,} tokens positions turn by the length (dynamic NTK scaling): kvern computes "
        f"the whole sequence again for each token there; --context {regimes.border} stays below"
    ]


def _replication(request: PlanRequest, model: ModelSpec) -> list[str]:
    if request.tp == 1:
        return []
    contents = [cache.content for layer in model.layers for cache in layer.caches]
    heads = [c.num_kv_heads for c in contents if isinstance(c, Heads)]
    found: list[str] = []
    if heads and min(heads) < request.tp:
        copies = request.tp // min(heads)
        found.append(
            f"{min(heads)} KV heads over {request.tp} tensor ranks: each head is stored "
            f"{copies} times, so the cache per rank shrinks by {min(heads)} and not by {request.tp}"
        )
    if any(isinstance(c, Latent) for c in contents) and request.dcp == 1:
        found.append(
            f"the MLA latent is replicated on all {request.tp} tensor ranks: more ranks do not "
            "shrink the cache per rank; --dcp or data parallelism does"
        )
    return found


def not_yet_stored(engine: str, kv_format: str | None, num_layers: int) -> str | None:
    """A sentence when kvern plans a format that its engine does not store yet; None otherwise."""
    if engine != "kvern" or kv_format in (None, "auto"):
        return None
    codecs = {codec for pair in parse_kv_format(kv_format, num_layers) for codec in pair}
    if codecs <= STORED_CODECS:
        return None
    return (
        f"kvern's engine stores {', '.join(stored_formats())} today: {kv_format} can be planned, not "
        "yet run"
    )


def _formats(request: PlanRequest) -> list[str]:
    stored = not_yet_stored(request.engine.lower(), request.kv_format, request.model.num_layers)
    if stored is not None:
        return [stored]
    if request.weights_format is None or request.kv_format not in (None, "auto"):
        return []
    name = request.weights_format.lower()
    if name not in NARROW_WEIGHTS:
        return []
    return [
        f"weights in {name} do not make the cache narrower: KV stays in 16 bit unless --kv-format "
        "says otherwise"
    ]


def _memory(request: PlanRequest) -> list[str]:
    found: list[str] = []
    device = request.device
    if device is not None and request.memory is None:
        marketed = device.memory_gb_marketed
        if device.memory_is_estimated:
            found.append(
                f"no driver report is known for {device.name}: {format_size(device.memory_bytes)} "
                f"is the marketed {marketed:g} GB times 0.985; give --memory SIZE if you know it"
            )
        else:
            gap = marketed * 2**30 - device.memory_bytes
            if gap > 2**28:
                found.append(
                    f"the {marketed:g} GB on the box are {format_size(device.memory_bytes)} to the "
                    f"driver, {format_size(gap)} less than {marketed:g} GiB"
                )
        if device.confidence == "low":
            found.append(f"the catalogue's row for {device.name} has low confidence")
    return found


def smallest_change(request: PlanRequest, fits: Callable[[PlanRequest], bool]) -> str:
    """The smallest change with which a request fits: cheapest kind first, one of each kind.

    Args:
        request: what does not fit.
        fits: whether a changed request does.
    """
    found = [
        next((flag for flag, changed in changes if fits(changed)), None)
        for changes in (
            _utilizations(request),
            _weight_formats(request),
            _tensor_degrees(request),
            _devices(request),
        )
    ]
    options = [flag for flag in found if flag is not None]
    if not options:
        return "it takes more memory, more ranks or narrower weights"
    if len(options) == 1:
        return f"the smallest change that fits is {options[0]}"
    verb = "also fits" if len(options) == 2 else "also fit"
    return f"the smallest change that fits is {options[0]}; {' and '.join(options[1:])} {verb}"


def _utilizations(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for share in (0.92, 0.95):
        if request.utilization is None or request.utilization < share:
            yield f"--utilization {share}", replace(request, utilization=share)


def _weight_formats(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if request.weights_bytes is not None:
        return
    bits, _ = weight_bits(request.weights_format, request.model)
    for name, narrower in sorted(WEIGHT_BITS.items(), key=lambda item: -item[1]):
        if narrower < bits:
            yield f"--weights-format {name}", replace(request, weights_format=name)


def _tensor_degrees(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    heads = request.model.num_attention_heads
    for tp in (2, 4, 8, 16):
        if tp > request.tp and (heads is None or heads % tp == 0):
            yield f"--tp {tp}", replace(request, tp=tp)


def _devices(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    total = request.total_memory or 0
    larger = [d for d in load_devices().values() if d.memory_bytes > total and not d.is_cpu]
    for device in sorted(larger, key=lambda d: d.memory_bytes):
        yield f"--device {device.id}", replace(request, device=device, memory=None)
