"""The correctness figure beside the speeds (field case QNT-002)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern import LLM
from kvern.bench.quality import LARGEST_MEAN_KL, LARGEST_OTHER_KL, compare, quality_of
from kvern.bench.text import quality_sentence
from kvern.check.faults.holds import replace_operation
from kvern.errors import IntegrityError

WRONG_HEAD, FACTOR = 0, 1.5


def wrong_scale(append: Callable[..., None]) -> Callable[..., None]:
    """Stores one head of one layer's keys too large."""
    count = 0

    def tampered(x: Any, stream: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        if count % 60 == 21:  # SmolLM2: values and keys of 30 layers
            x = x.copy()
            x[:, WRONG_HEAD] *= FACTOR
        append(x, stream, batch)

    return tampered


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16", "int8"])
def test_every_format_is_as_far_from_float32_as_rounding(
    smollm2_path: Path, kv_format: str
) -> None:
    with LLM(smollm2_path, kv_format=kv_format, kv_memory="32MiB", threads=2) as llm:
        quality = quality_of(llm)
    assert quality["mean_kl"] <= LARGEST_MEAN_KL.get(kv_format, LARGEST_OTHER_KL) / 4
    assert quality["same_likeliest"] > 0.95 and quality["positions"] == 3 * 96
    assert (quality["max_kl"] == 0) == (kv_format == "fp32")
    assert "288 positions" in quality_sentence(quality)


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_qnt_002_a_wrong_scale_of_one_head_stops_the_benchmark(
    smollm2_path: Path, kv_format: str
) -> None:
    options = {"kv_memory": "32MiB", "threads": 2, "weights_format": "fp32"}
    with (
        LLM(smollm2_path, kv_format=kv_format, **options) as llm,
        LLM(smollm2_path, kv_format="fp32", share_weights_with=llm, **options) as exact,
    ):
        compare(llm, exact)
        llm.model.runner.workspace.recorded.is_refused = True
        llm.model.runner.workspace.recorded.program = None
        replace_operation(llm, "append", wrong_scale)
        with pytest.raises(IntegrityError, match="speeds of wrong answers mean nothing"):
            compare(llm, exact)


def test_logits_that_are_no_numbers_are_found(smollm2_path: Path) -> None:
    with LLM(smollm2_path, kv_memory="32MiB", threads=2) as llm:
        llm.model.runner.workspace.recorded.is_refused = True
        replace_operation(llm, "attend", lambda attend: lambda *a: a[-1].fill(np.nan) or 0)
        with pytest.raises(IntegrityError):
            compare(llm, llm)
