"""Matrix products and embedding of the native backend, on every kernel path and element type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.kernels.dequant import dequantize
from kvern.kernels.native import ELEMENT_TYPES, NativeBackend
from kvern.kernels.protocol import HostTensor

from .native_cases import BLOCKS, PATHS, QUANTISED, random_tensor

pytestmark = pytest.mark.usefixtures("require_native")


def product(
    backend: NativeBackend, tensors: list[HostTensor], x: np.ndarray, weights_format: str
) -> np.ndarray:
    weight = backend.prepare(tensors, weights_format)
    out = np.full((len(x), sum(t.rows for t in tensors)), np.nan, np.float32)
    backend.matmul(x, weight, out)
    return out


def decoded(tensor: HostTensor) -> np.ndarray:
    return dequantize(tensor.data, tensor.type, tensor.rows, tensor.cols)


def random_rows(num_tokens: int, cols: int, seed: int = 1) -> np.ndarray:
    """Rows of very different magnitudes, with an outlier each and one row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, cols)) * 10.0 ** rng.uniform(-3, 3, (num_tokens, 1))
    x[np.arange(num_tokens), rng.integers(0, cols, num_tokens)] *= 20
    x[num_tokens // 2] = 0
    return x.astype(np.float32)


def int8_error_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What rounding x to int8 can cost: half a step, 1/254 of the block's largest, per feature."""
    blocks = np.abs(x).reshape(len(x), -1, 32).max(axis=2)
    steps = np.repeat(blocks / 254.0, 32, axis=1)
    return steps @ np.abs(w).T.astype(np.float64)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@settings(max_examples=12)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    num_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_product_equals_float64_within_the_recipe(
    path: str, element_type: str, rows: int, blocks: int, num_tokens: int, seed: int
) -> None:
    backend = NativeBackend(2, path)
    cols = blocks * (BLOCKS[element_type][0] if element_type in BLOCKS else 19)
    tensor = random_tensor(element_type, rows, cols, seed)
    w = decoded(tensor).astype(np.float64)
    x = random_rows(num_tokens, cols, seed)
    exact = x.astype(np.float64) @ w.T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).T
    rounding = 4e-7 * np.sqrt(cols) * magnitude + 1e-30
    as_float = product(backend, [tensor], x, "fp32")
    assert np.all(np.abs(as_float - exact) <= rounding)
    stored = product(backend, [tensor], x, "auto")
    bound = int8_error_bound(x, w) if element_type in BLOCKS else 0.0
    assert np.all(np.abs(stored - exact) <= rounding * 8 + bound)


def to_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("element_type", ["Q4_1", "Q6_K", "F32", "BF16"])
@settings(max_examples=12)
@given(
    rows=st.integers(1, 150),
    blocks=st.integers(1, 3),
    num_tokens=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_products_in_bf16_equal_float64_ones_of_rounded_factors(
    path: str, element_type: str, rows: int, blocks: int, num_tokens: int, seed: int
) -> None:
    """Weights and activations are rounded to bf16 once, to the nearest; nothing else but the sums rounds."""
    backend = NativeBackend(2, path)
    cols = blocks * (BLOCKS[element_type][0] if element_type in BLOCKS else 19)
    tensor = random_tensor(element_type, rows, cols, seed)
    w, x = to_bf16(decoded(tensor)), random_rows(num_tokens, cols, seed)
    rounded = to_bf16(x).astype(np.float64)
    exact = rounded @ w.T.astype(np.float64)
    magnitude = np.abs(rounded) @ np.abs(w).T.astype(np.float64)
    got = product(backend, [tensor], x, "bf16")
    assert np.all(np.abs(got - exact) <= 4e-7 * np.sqrt(cols) * magnitude + 1e-30)


@pytest.mark.parametrize("path", PATHS)
def test_bf16_factors_cost_less_than_half_a_percent(path: str) -> None:
    """The stated error: root mean square below 0.4 % of the result's, for normal activations."""
    backend, rng = NativeBackend(2, path), np.random.default_rng(5)
    tensor = random_tensor("F32", 128, 1024)
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    exact = x.astype(np.float64) @ decoded(tensor).astype(np.float64).T
    error = product(backend, [tensor], x, "bf16") - exact
    assert np.sqrt((error**2).mean()) < 0.004 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("element_type", QUANTISED)
def test_int8_activations_cost_less_than_one_percent(path: str, element_type: str) -> None:
    """The stated error: root mean square below 0.8 % of the result's, for normal activations."""
    rng = np.random.default_rng(5)
    backend = NativeBackend(2, path)
    tensor = random_tensor(element_type, 128, 1024)
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    exact = x.astype(np.float64) @ decoded(tensor).astype(np.float64).T
    error = product(backend, [tensor], x, "auto") - exact
    assert np.sqrt((error**2).mean()) < 0.008 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("path", PATHS)
def test_stacked_tensors_of_different_types(path: str) -> None:
    backend = NativeBackend(2, path)
    tensors = [
        random_tensor("Q4_K", 37, 512, 1),
        random_tensor("Q6_K", 16, 512, 2),
        random_tensor("F16", 5, 512, 3),
    ]
    x = random_rows(9, 512)
    stacked = product(backend, tensors, x, "auto")
    alone = [product(backend, [t], x, "auto") for t in tensors]
    assert stacked.tobytes() == np.concatenate(alone, axis=1).tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_embedding_rows_equal_the_decoded_weight(path: str, element_type: str) -> None:
    backend = NativeBackend(2, path)
    tensor = random_tensor(element_type, 50, 512)
    ids = np.array([49, 0, 17, 17, 16, 15], np.int32)
    for weights_format in ("auto", "fp32", "bf16"):
        out = np.empty((len(ids), 512), np.float32)
        backend.embed(backend.prepare([tensor], weights_format), ids, out)
        rows = decoded(tensor)[ids]
        np.testing.assert_array_equal(out, to_bf16(rows) if weights_format == "bf16" else rows)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("element_type", "weights_format"),
    [("Q4_1", "auto"), ("Q8_0", "auto"), ("F32", "auto"), ("F32", "bf16")],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_activation_spoils_its_own_row_only(
    path: str, element_type: str, weights_format: str, bad: float
) -> None:
    backend = NativeBackend(2, path)
    tensor = random_tensor(element_type, 48, 64)
    x = random_rows(8, 64)
    clean = product(backend, [tensor], x, weights_format)
    x[3, 40] = bad
    spoilt = product(backend, [tensor], x, weights_format)
    assert not np.isfinite(spoilt[3]).any()
    keep = np.arange(8) != 3
    assert spoilt[keep].tobytes() == clean[keep].tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_extreme_codes_do_not_saturate(path: str) -> None:
    """-128 in every weight against full-scale activations of either sign."""
    backend = NativeBackend(1, path)
    raw = np.full((16, 4, 34), 0x80, np.uint8)
    raw[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    tensor = HostTensor("w", "Q8_0", 16, 128, raw.reshape(-1))
    x = np.full((2, 128), 127.0, np.float32)
    x[1] *= -1
    out = product(backend, [tensor], x, "auto")
    np.testing.assert_array_equal(
        out, np.array([[-128.0 * 127 * 128], [128.0 * 127 * 128]]) + np.zeros((2, 16))
    )


@pytest.mark.parametrize("element_type", QUANTISED)
@pytest.mark.parametrize("cols", [256, 1536])
def test_tiles_give_the_numbers_of_avx512(element_type: str, cols: int) -> None:
    """Sums are exact and the float steps the same; blocks more and fewer than are taken at once."""
    if "amx" not in PATHS:
        pytest.skip("this processor has no tile registers")
    tensor = random_tensor(element_type, 300, cols, seed=3)
    x = random_rows(37, cols)
    expected = product(NativeBackend(2, "avx512"), [tensor], x, "auto")
    got = product(NativeBackend(2, "amx"), [tensor], x, "auto")
    assert got.tobytes() == expected.tobytes()
