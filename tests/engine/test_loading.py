"""Which model a cache belongs to."""

from __future__ import annotations

from pathlib import Path

from tests.engine.conftest import write_tiny_model

from kvern.engine.loading import _load_weights
from kvern.engine.settings import EngineSettings


def name_of(folder: Path) -> str:
    return _load_weights(folder, EngineSettings(backend="reference")).fingerprint


def test_a_models_name_covers_weights_and_configuration(tmp_path: Path) -> None:
    """Equal weights that are read in another way are another model: their keys differ."""
    base = name_of(write_tiny_model(tmp_path / "base"))
    assert name_of(write_tiny_model(tmp_path / "again")) == base
    others = [
        name_of(write_tiny_model(tmp_path / "weights", seed=1)),
        name_of(write_tiny_model(tmp_path / "theta", rope_theta=20000.0)),
        name_of(write_tiny_model(tmp_path / "eps", rms_norm_eps=1e-6)),
        name_of(
            write_tiny_model(
                tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 2.0}
            )
        ),
    ]
    assert len({base, *others}) == 5
