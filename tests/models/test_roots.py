"""Folders whose names start otherwise: text models inside multimodal ones, checkpoints of the bare model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.cases import CASES
from tests.models.harness import (
    SavedModels,
    alone,
    assert_agrees,
    backend_of,
    decoder_of,
    random_ids,
    run,
)

Rename = Callable[[str], str]


def inside_older(name: str) -> str:
    return "language_model." + name


def inside_newer(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def bare(name: str) -> str:
    return name.removeprefix("transformer.")


ROOTS: list[tuple[str, Rename]] = [
    ("llama4", inside_older),
    ("llama4", inside_newer),
    ("gemma3", inside_newer),
    ("gpt2", bare),
]


@pytest.mark.parametrize(("family", "rename"), ROOTS, ids=[f"{f}-{r.__name__}" for f, r in ROOTS])
def test_other_roots_are_found(
    tmp_path: Path,
    saved: SavedModels,
    family: str,
    rename: Rename,
    request: pytest.FixtureRequest,
) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    model = saved(next(case for case in CASES if case.family == family))
    config = json.loads((model.folder / "config.json").read_text())
    if rename is not bare:
        config = {"architectures": config["architectures"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = numpy_files.load_file(model.folder / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    numpy_files.save_file(renamed, tmp_path / "model.safetensors")
    decoder = decoder_of(tmp_path, backend_of("reference", request))
    ids = random_ids(decoder, 20)
    assert_agrees(run(decoder, [ids], alone(20))[0], model.logits(ids))
