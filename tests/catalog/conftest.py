from __future__ import annotations

from pathlib import Path

import pytest
from tests.catalog.fake_index import FakeIndex, build_index

PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """A fake index that the user's own pip configuration file points at, and nothing else."""
    fake = build_index(tmp_path / "index")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {fake.folder}\n")
    for name in PIP_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return fake


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which $KVERN_HOME names."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVERN_HOME", str(folder))
    return folder
