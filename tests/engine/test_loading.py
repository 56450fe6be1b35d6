"""What is loaded, and which model a cache belongs to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.usefixtures("require_native")
def test_the_native_engine_loads_no_other_backend() -> None:
    """Each costs every start as much as reading the model's file."""
    script = (
        "import sys\n"
        "from kvern.engine.backends import make_backend\n"
        "make_backend('native', 1)\n"
        "others = {'array_api_compat', 'torch', 'kvern.kernels.reference'} & set(sys.modules)\n"
        "assert not others, others\n"
        "make_backend('reference', 1)\n"
        "assert 'kvern.kernels.reference' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
