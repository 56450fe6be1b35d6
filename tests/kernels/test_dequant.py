"""Every stored element type decodes to the same float32 numbers as the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.kernels.dequant import ELEMENT_TYPES, dequantize

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")


@pytest.mark.parametrize("element_type", sorted(ELEMENT_TYPES))
def test_decoding_random_bits_equals_the_oracle(element_type: str) -> None:
    kind = ELEMENT_TYPES[element_type]
    rng = np.random.default_rng(3)
    rows, cols = 7, 768
    data = rng.integers(
        0, 256, rows * cols // kind.block_elements * kind.block_bytes, dtype=np.uint8
    )
    with np.errstate(all="ignore"):  # random bits make infinite and NaN scales, on purpose
        ours = dequantize(data, element_type, rows, cols)
    oracle_type = gguf.GGMLQuantizationType[element_type]
    with np.errstate(all="ignore"):
        theirs = quants.dequantize(data.reshape(rows, -1), oracle_type)
    theirs = np.asarray(theirs, dtype=np.float32).reshape(rows, cols)
    assert ours.shape == (rows, cols) and ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


def test_wrong_byte_count_and_unknown_type_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes are not a 1 x 32 matrix of Q8_0"):
        dequantize(np.zeros(33, np.uint8), "Q8_0", 1, 32)
    with pytest.raises(ValueError, match="Q2_K is not one of"):
        dequantize(np.zeros(84, np.uint8), "Q2_K", 1, 256)
