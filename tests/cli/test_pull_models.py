"""`kvern pull` and `kvern models`, against a fake index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.catalog.conftest import home, index  # noqa: F401  the fixtures
from tests.catalog.fake_index import FakeIndex

from kvern import catalog
from kvern.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:  # noqa: F811
    monkeypatch.setitem(catalog.CATALOG, "tiny", index.entry)
    return index


def test_pull_tells_path_and_licence(tiny: FakeIndex, home: Path, capsys: Captured) -> None:  # noqa: F811
    assert main(["pull", "tiny"]) == 0
    path = home / "models" / "tiny.gguf"
    assert capsys.readouterr().out == f"tiny: {path}\nlicence: CC0-1.0\n"

    assert main(["pull", "tiny"]) == 0
    assert "(was here already, checked)" in capsys.readouterr().out


def test_pull_json(tiny: FakeIndex, home: Path, capsys: Captured) -> None:  # noqa: F811
    assert main(["pull", "tiny", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first == {
        "model": "tiny",
        "path": str(home / "models" / "tiny.gguf"),
        "licence": "CC0-1.0",
        "bytes": len(tiny.content),
        "sha256": tiny.entry.file_sha256,
        "fetched": True,
    }
    assert main(["pull", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**first, "fetched": False}


def test_models_tells_what_is_here(tiny: FakeIndex, capsys: Captured) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["tiny"]["on_disk"] is False
    assert rows["tiny"]["path"] is None
    assert rows["smollm2"]["on_disk"] is False

    main(["pull", "tiny"])
    capsys.readouterr()
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "here; context 8; CC0-1.0" in printed
    assert "93 MB to fetch; context 8,192; Apache-2.0" in printed


def test_unwritable_cache_and_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    blocker = tmp_path / "blocker"
    blocker.touch()
    monkeypatch.setenv("KVERN_HOME", str(blocker))
    assert main(["pull", "smollm2"]) == 1
    assert "cannot write to the cache folder" in capsys.readouterr().err
    assert main(["pull", "smollm9"]) == 1
    assert "unknown model 'smollm9'" in capsys.readouterr().err
