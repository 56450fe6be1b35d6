"""A small model to measure, and a peer that needs no installation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import write_tiny_model

FAKE_ADAPTER = """
import os, time

print("libraries print where they like")
os.write(1, b"even past Python\\n")


class Adapter:
    def load(self, options):
        if "refuse" in options:
            raise ValueError("no such model")
        self.options = options
        return {"version": "fake 1.0", "weight_bytes": 1000, "saw": sorted(options)}

    def run(self, work):
        if self.options.get("fails_on") == work["item"]:
            raise RuntimeError("out of\\nmemory")
        if self.options.get("dies_on") == work["item"]:
            os._exit(3)
        time.sleep(self.options.get("sleep_s", 0.0))
        return {
            "wall_s": 2.0,
            "requests": [
                {"ttft_s": 0.5, "e2e_s": 2.0, "queue_s": None, "cached_tokens": None,
                 "new_tokens": request["max_tokens"]}
                for request in work["requests"]
            ],
            "kv": None,
        }
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def fake_adapter(tmp_path: Path) -> Path:
    """A file with an adapter whose times are made up."""
    path = tmp_path / "fake_adapter.py"
    path.write_text(FAKE_ADAPTER)
    return path


@pytest.fixture
def peers_dir(tmp_path: Path, tiny_model: Path, fake_adapter: Path) -> Path:
    """llama.cpp is there and works, in two variants; transformers fails; openvino's file is gone."""
    folder = tmp_path / "peers"

    def describe(name: str, model: str, variants: list[dict[str, Any]]) -> None:
        (folder / name).mkdir(parents=True)
        described = {
            "name": name,
            "python": sys.executable,
            "adapter": str(fake_adapter),
            "made_from": str(tiny_model),
            "variants": [{"model": model, **variant} for variant in variants],
        }
        (folder / name / "peer.json").write_text(json.dumps(described))

    describe(
        "llama.cpp",
        str(tiny_model),
        [{"name": "Q4_0"}, {"name": "Q8_0", "cases": ["a"], "options": {"fails_on": "a"}}],
    )
    describe("transformers", str(tiny_model), [{"name": "bf16", "options": {"refuse": True}}])
    describe("openvino", "../models/gone.gguf", [{"name": "Q4_1"}])
    return folder
