"""The device catalogue: what a driver reports, never what a data sheet markets.

The rows are data (`data/devices.json`); each keeps its confidence and its sources. A marketed
"80 GB" is 85,520,809,984 bytes on one card and 85,899,345,920 on another, and 80 GiB on neither
by definition, so nothing here multiplies a marketed figure by 2^30.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from kvern.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or CPU socket.

    Attributes:
        memory_bytes: total as the driver reports it; where no report is known
            (`memory_is_estimated`), the marketed figure times 0.985.
        bandwidth: peak memory bandwidth, bytes per second.
        flops: dense peak per number format, operations per second; a missing key is unknown.
        achievable_flops: measured matrix-product ceilings, where published.
        cache_bytes: largest on-die cache shared by the whole device.
        link_bandwidth: device-to-device, one direction, bytes per second; 0 without a link.
        host_bandwidth: device-to-host, one direction, bytes per second.
        confidence: "high", "medium" or "low": how well the row is sourced.
    """

    id: str
    name: str
    vendor: str
    memory_gb_marketed: float
    memory_bytes: int
    memory_is_estimated: bool
    memory_basis: str
    bandwidth: float
    flops: Mapping[str, float]
    achievable_flops: Mapping[str, float]
    cache_bytes: int | None
    link_bandwidth: float | None
    host_bandwidth: float | None
    unified_memory: bool
    confidence: str
    sources: tuple[str, ...]
    notes: str

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU socket, whose memory is whatever was installed."""
        return self.vendor.endswith("-cpu")


def _from_row(row: Mapping[str, object]) -> Device:
    def number(key: str, scale: float) -> float | None:
        value = row[key]
        return float(value) * scale if isinstance(value, int | float) else None

    def table(key: str) -> dict[str, float]:
        value = row[key]
        if not isinstance(value, Mapping):
            return {}
        return {name: float(v) * 1e12 for name, v in value.items() if v is not None}

    link = number("link_gbs_bidirectional", 1e9)
    cache_bytes = number("last_level_cache_mb", 1e6)
    sources = row["sources"]
    return Device(
        id=str(row["id"]),
        name=str(row["name"]),
        vendor=str(row["vendor"]),
        memory_gb_marketed=number("memory_gb_marketed", 1.0) or 0.0,
        memory_bytes=int(number("memory_bytes", 1.0) or 0),
        memory_is_estimated=bool(row["memory_is_estimated"]),
        memory_basis=str(row["memory_basis"]),
        bandwidth=number("bandwidth_gbs", 1e9) or 0.0,
        flops=table("tflops_dense"),
        achievable_flops=table("tflops_achievable"),
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        link_bandwidth=None if link is None else link / 2,
        host_bandwidth=number("pcie_gbs_per_direction", 1e9),
        unified_memory=bool(row["unified_memory"]),
        confidence=str(row["confidence"]),
        sources=tuple(map(str, sources)) if isinstance(sources, list) else (),
        notes=str(row["notes"]),
    )


@cache
def load_devices() -> Mapping[str, Device]:
    """The catalogue, by id, in file order."""
    text = files("kvern.plan").joinpath("data", "devices.json").read_text(encoding="utf-8")
    return {row["id"]: _from_row(row) for row in json.loads(text)["devices"]}


def find_device(name: str) -> Device:
    """The device called `name`: an id, a full name, or words that only one row contains.

    Raises:
        UsageError: no row or several rows match; the nearest ids are offered.
    """
    devices = load_devices()
    wanted = _plain(name)
    for device in devices.values():
        if wanted in (_plain(device.id), _plain(device.name)):
            return device
    words = wanted.split()
    matches = [
        d for d in devices.values() if words and all(w in _plain(f"{d.id} {d.name}") for w in words)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(d.id for d in matches)
        raise UsageError(f"device {name!r} could be any of {names}: name one of them")
    raise UsageError(
        f"unknown device {name!r}; nearest: {', '.join(nearest_devices(name))} "
        "(`kvern plan --list-devices` shows all), or give --memory SIZE"
    )


def nearest_devices(name: str, count: int = 3) -> list[str]:
    """Ids whose spelling is closest to `name`, best first; never empty."""
    devices = load_devices()
    spellings: dict[str, str] = {}
    for device in devices.values():
        for spelling in (_plain(device.id), _plain(device.name), *_plain(device.name).split()):
            spellings.setdefault(spelling, device.id)
    close = get_close_matches(_plain(name), spellings, n=4 * count, cutoff=0.4)
    ids = list(dict.fromkeys(spellings[spelling] for spelling in close))
    return (ids or list(devices))[:count]


def _plain(text: str) -> str:
    return " ".join(text.lower().replace("-", " ").replace("_", " ").split())
