"""Other engines on this machine: who is installed where, with which files.

``benchmarks/peers/setup.sh`` makes one folder per engine, with its own environment and a
``peer.json``::

    {"name": "llama.cpp", "version": "...", "python": "bin/python", "adapter": "/.../llama_cpp.py",
     "made_from": "smollm2",
     "variants": [{"name": "Q4_0", "model": "../models/smollm2-Q4_0.gguf", "kv_format": "f16", ...}]}

Paths may be relative to the folder. Each variant becomes an engine of its own in the results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvern import catalog
from kvern.errors import UsageError

PEERS = ("llama.cpp", "transformers", "vllm", "openvino")
PEERS_VARIABLE = "KVERN_PEERS"
SETUP_HINT = "benchmarks/peers/setup.sh sets it up"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine with one model file and one set of options: a line in the results.

    Attributes:
        label: ``llama.cpp Q4_0``.
        peer: ``llama.cpp``; ``kvern`` for our own.
        python: interpreter of its environment.
        adapter: see `kvern.bench.serve`.
        model: file or folder that it loads.
        same_file: whether that is the very file that our own engine loads.
        options: what ``load`` is told beside the model.
        cases: the cases it takes part in; empty: all.
        environment: further variables of its process.
    """

    label: str
    peer: str
    python: Path
    adapter: Path
    model: Path
    same_file: bool
    options: dict[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def takes_part_in(self, case: str) -> bool:
        """Whether its figures are wanted for a case."""
        return not self.cases or case in self.cases


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that was asked for and is not here, and why."""

    name: str
    reason: str


def default_peers_dir() -> Path:
    """``$KVERN_PEERS``, or ``peers`` in the cache folder."""
    named = os.environ.get(PEERS_VARIABLE)
    return Path(named).expanduser() if named else catalog.cache_home() / "peers"


def find_peers(
    names: Sequence[str], folder: Path, model_name: str, model_path: Path
) -> tuple[list[Engine], list[Absent]]:
    """The variants of the named peers that are installed, and those that are not, with the reason.

    Args:
        names: from `PEERS`.
        folder: where the set-up script put them.
        model_name: what the user asked for; a peer whose files were made from another model is absent.
        model_path: the file that our own engine loads.

    Raises:
        UsageError: a name that is not a peer's.
    """
    engines: list[Engine] = []
    absent: list[Absent] = []
    for name in names:
        if name not in PEERS:
            raise UsageError(f"peer {name!r} is unknown: choose from {', '.join(PEERS)}")
        found = _read_peer(name, folder / name, model_name, model_path)
        if isinstance(found, Absent):
            absent.append(found)
        else:
            engines += found
    return engines, absent


def _read_peer(name: str, folder: Path, model_name: str, model_path: Path) -> list[Engine] | Absent:
    path = folder / "peer.json"
    if not path.is_file():
        return Absent(name, f"not installed in {folder.parent}: {SETUP_HINT}")
    try:
        described = json.loads(path.read_text())
        if described["made_from"] != model_name:
            return Absent(
                name, f"its files were made from {described['made_from']}, not from {model_name}"
            )
        engines = [_engine(folder, described, v, model_path) for v in described["variants"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Absent(name, f"{path} cannot be read ({error!r}): {SETUP_HINT}")
    missing = [e.model for e in engines if not e.model.exists()]
    missing += [p for e in engines for p in (e.python, e.adapter) if not p.exists()]
    if missing:
        return Absent(name, f"{missing[0]} is missing: {SETUP_HINT}")
    return engines


def _engine(
    folder: Path, described: dict[str, Any], variant: dict[str, Any], model_path: Path
) -> Engine:
    model = folder / variant["model"]
    return Engine(
        label=f"{described['name']} {variant['name']}",
        peer=described["name"],
        python=folder / described["python"],
        adapter=folder / described["adapter"],
        model=model,
        same_file=model.exists() and model.samefile(model_path),
        options=dict(variant.get("options", {})),
        cases=tuple(variant.get("cases", ())),
        environment=dict(described.get("environment", {})),
    )
