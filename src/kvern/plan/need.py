"""The other direction: the smallest device, degree and format that serve N requests of length L."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvern.errors import KvernError, UsageError
from kvern.plan.capacity import plan
from kvern.plan.devices import Device, load_devices
from kvern.plan.request import PlanRequest
from kvern.plan.result import Plan

DEGREES = (1, 2, 4, 8)
FORMATS = ("bf16", "fp8", "int8", "int4")
ENGINE_FORMATS = {
    "kvern": FORMATS,
    "vllm": ("bf16", "fp8"),
    "sglang": ("bf16", "fp8"),
    "llama.cpp": ("f16", "q8_0", "q4_0"),
    "ik_llama.cpp": ("f16", "q8_0", "q4_0"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One set-up that serves the need.

    Attributes:
        device_memory: bytes of all devices together.
        concurrency: requests of the needed length that fit.
    """

    device: Device
    tp: int
    kv_format: str
    plan: Plan

    @property
    def total_memory(self) -> int:
        """Bytes of all devices together."""
        return self.device.memory_bytes * self.plan.request.num_ranks

    @property
    def concurrency(self) -> float:
        """Requests of the needed length that fit at once."""
        return self.plan.allocation.max_concurrency


def parse_need(text: str) -> tuple[int, int]:
    """Reads "32x16384": requests at once, tokens of each.

    Raises:
        UsageError: not of that form, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(\d+)(k?)\s*", text.lower())
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise UsageError(f"--need {text!r} is not of the form REQUESTSxTOKENS, such as 32x16384")
    return int(match[1]), int(match[2]) * (1024 if match[3] else 1)


def options_for(request: PlanRequest, need: str) -> list[Option]:
    """Set-ups that serve the need, smallest total memory first, at most one per device and degree.

    Devices, degrees and formats that the request fixes stay fixed; CPUs are not searched. For each
    device and degree the widest format that suffices is kept.

    Raises:
        UsageError: the need is malformed, memory is fixed that the search is to find, or nothing
            can be answered for this model at all (its weights are not known, say).
    """
    count, context = parse_need(need)
    _refuse_fixed_memory(request)
    devices = (
        [request.device]
        if request.device is not None
        else [d for d in load_devices().values() if not d.is_cpu and not d.unified_memory]
    )
    degrees = (request.tp,) if request.tp > 1 else DEGREES
    formats = (
        (request.kv_format,)
        if request.kv_format not in (None, "auto")
        else ENGINE_FORMATS.get(request.engine.lower(), FORMATS)
    )
    found: list[Option] = []
    refusals: list[UsageError] = []
    for device in devices:
        for tp in degrees:
            option = _widest(request, device, tp, formats, (count, context), refusals)
            if option is not None:
                found.append(option)
    if not found and len(refusals) == len(devices) * len(degrees) * len(formats):
        raise refusals[0]
    return sorted(found, key=lambda o: (o.total_memory, o.tp, -o.concurrency))


def _refuse_fixed_memory(request: PlanRequest) -> None:
    for flag in ("memory", "kv_memory", "num_blocks", "num_tokens"):
        if getattr(request, flag) is not None:
            name = {"num_tokens": "max-total-tokens"}.get(flag, flag.replace("_", "-"))
            raise UsageError(
                f"--need searches for the memory and --{name} fixes it: leave one of them out"
            )


def _widest(
    request: PlanRequest,
    device: Device,
    tp: int,
    formats: tuple[str | None, ...],
    need: tuple[int, int],
    refusals: list[UsageError],
) -> Option | None:
    """The widest format with which the set-up serves the need; what is no question is noted."""
    count, context = need
    llama = request.engine.lower() in ("llama.cpp", "ik_llama.cpp")
    for kv_format in formats:
        try:
            asked = replace(
                request,
                device=device,
                memory=None,
                tp=1 if llama else tp,
                pp=tp if llama else request.pp,
                kv_format=kv_format,
                context=context * count if llama else context,
                slots=count if llama else request.slots,
            )
            answer = plan(asked)
        except UsageError as error:
            refusals.append(error)
            continue
        except KvernError:
            continue
        if answer.allocation.fits and answer.allocation.max_concurrency >= count:
            return Option(device, tp, str(kv_format), answer)
    return None
