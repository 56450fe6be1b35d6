"""Names, paths and hub ids."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from kvern import catalog
from kvern.catalog.hub import is_hub_id
from kvern.catalog.pip_download import explain_failure
from kvern.errors import FetchError, ModelError


def test_every_entry_is_pinned() -> None:
    for name, entry in catalog.CATALOG.items():
        assert entry.name == name
        for digest in (entry.file_sha256, *(part.wheel_sha256 for part in entry.parts)):
            assert re.fullmatch(r"[0-9a-f]{64}", digest)
        assert entry.licence
        assert entry.file_name.endswith(".gguf")
        assert all(part.wheel_bytes > 0 for part in entry.parts)
    assert catalog.DEFAULT_MODEL in catalog.CATALOG


def test_a_name_that_was_never_fetched(home: Path) -> None:
    with pytest.raises(ModelError, match="not on this machine yet: run `kvern pull smollm2`"):
        catalog.locate("smollm2")
    assert not home.exists()  # looking leaves no trace


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVERN_HOME", str(tmp_path))
    assert catalog.cache_home() == tmp_path
    monkeypatch.setenv("KVERN_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.cache_home() == tmp_path / ".cache" / "kvern"


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert catalog.locate(file) == file
    assert catalog.locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["model.gguf", "./folder", "/nowhere/at/all", "a/b/config.json"])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match=f"no file or folder {re.escape(name)}"):
        catalog.resolve(name)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'smollm3'.*smollm2, gemma3-270m"):
        catalog.resolve("smollm3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("org/name:sub/model-q4.gguf", True),
        ("org/name.gguf", False),
        ("../name", False),
        ("a/b/c", False),
        ("smollm2", False),
    ],
)
def test_hub_ids(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected


def test_hub_id_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=r"pip install 'kvern\[hub\]'"):
        catalog.resolve("org/name")


class FakeHub(types.ModuleType):
    """huggingface_hub as far as the catalogue calls it."""

    def __init__(self, *, local: Path | None, remote: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.local, self.remote = local, remote
        self.calls: list[bool] = []
        self.errors = types.SimpleNamespace(
            GatedRepoError=PermissionError,
            RepositoryNotFoundError=LookupError,
            EntryNotFoundError=KeyError,
        )

    def snapshot_download(
        self, repo: str, *, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        self.calls.append(local_files_only)
        if local_files_only:
            if self.local is None:
                raise ValueError("not in the cache")
            return str(self.local)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def test_hub_model_is_looked_for_locally_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = FakeHub(local=tmp_path, remote=OSError("no network"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert catalog.resolve("org/name") == tmp_path
    assert hub.calls == [True]


@pytest.mark.parametrize(
    ("remote", "kind", "match"),
    [
        (OSError("no route"), FetchError, r"cannot fetch org/name from the hub \(no route\)"),
        (LookupError(), ModelError, "the hub has no org/name"),
        (PermissionError(), ModelError, "accept its licence"),
    ],
)
def test_hub_failures(
    remote: Exception, kind: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(local=None, remote=remote))
    with pytest.raises(ModelError, match="kvern pull org/name"):
        catalog.locate("org/name")
    with pytest.raises(kind, match=match):
        catalog.resolve("org/name")


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("/usr/bin/python3: No module named pip\n", "pip is missing"),
        ("OSError: [Errno 28] No space left on device\n", "the disk filled up"),
        ("WARNING: NewConnectionError(...)\nERROR: No matching distribution found for x", "reach"),
        ("WARNING: SSLError\nERROR: No matching distribution found for x", "cannot reach"),
        ("ERROR: No matching distribution found for x==1\n", "does not have x==1"),
        ("ERROR: odd thing\nnoise\n", "pip could not download the model: odd thing"),
        ("", "it printed nothing"),
    ],
)
def test_what_pip_prints_becomes_one_sentence(output: str, sentence: str) -> None:
    explained = explain_failure(output)
    assert sentence in explained
    assert "\n" not in explained
