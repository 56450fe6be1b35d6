"""Row-wise operations give a row the same bits whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.models.harness import backend_of

from kvern.kernels.protocol import Backend
from kvern.kernels.reference_routing import largest
from kvern.kernels.reference_state import sigmoid, silu, softmax, softplus
from kvern.models.config import ExpertsConfig
from kvern.models.feed_forward import Experts, ExpertsWeights
from kvern.models.rowwise import Norm

Operation = Callable[[np.ndarray], np.ndarray]

ELEMENTWISE: dict[str, Operation] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "tanh": np.tanh,
}


def assert_row_invariant(operation: Operation, x: np.ndarray) -> None:
    """One row alone, a few, and all of them, at any place in memory."""
    whole = operation(x)
    for start, stop in ((0, 1), (5, 6), (3, 10), (len(x) - 1, len(x)), (0, len(x) - 2)):
        assert np.array_equal(operation(np.ascontiguousarray(x[start:stop])), whole[start:stop])
        shifted = np.empty((stop - start) * x.shape[1] + 3, np.float32)[3:].reshape(-1, x.shape[1])
        shifted[...] = x[start:stop]
        assert np.array_equal(operation(shifted), whole[start:stop])


@pytest.mark.parametrize("width", [1, 7, 64, 129, 640, 2561])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_rows_do_not_depend_on_their_neighbours(name: str, width: int) -> None:
    x = np.random.default_rng(width).normal(0, 3, (37, width)).astype(np.float32)
    assert_row_invariant(ELEMENTWISE[name], x)


@pytest.mark.parametrize("width", [64, 129, 2561])
def test_a_layer_norm_is_row_invariant_and_right(
    width: int, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(width)
    x = rng.normal(2, 3, (37, width)).astype(np.float32)
    weight, bias = rng.normal(1, 0.3, (2, width)).astype(np.float32)
    norm = Norm(weight, bias, 1e-5, is_centered=True)

    def apply(backend: Backend) -> Operation:
        def run(rows: np.ndarray) -> np.ndarray:
            out = np.empty_like(rows)
            norm.apply(backend, rows, out)
            return out

        return run

    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    for name in ("reference", "native"):
        run = apply(backend_of(name, request))
        assert np.allclose(run(x), expected, atol=1e-5)
        if name == "native":
            assert_row_invariant(run, x)


def test_ties_go_to_the_lower_index() -> None:
    scores = np.array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]], np.float32)
    assert largest(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


def test_plain_activations(request: pytest.FixtureRequest) -> None:
    x = np.array([[-2.0, -0.5, 0.0, 0.5, 3.0]], np.float32)
    out = np.empty_like(x)
    for name in ("reference", "native"):
        backend = backend_of(name, request)
        backend.gate(x, "relu2", None, out)
        assert out.tolist() == [[0, 0, 0, 0.25, 9]]
        backend.gate(x, "silu", None, out)
        assert np.allclose(out, x / (1 + np.exp(-x)))


def test_extremes_neither_overflow_nor_warn() -> None:
    x = np.array([[-200.0, -20.0, 0.0, 20.0, 200.0]], np.float32)
    assert sigmoid(x)[0, 0] == 0 and sigmoid(x)[0, -1] == 1
    assert softplus(x)[0, -1] == 200 and softplus(x)[0, 0] == 0
    assert np.isfinite(softmax(x)).all()


def test_the_margin_says_how_near_a_tie_the_choice_is() -> None:
    config = ExpertsConfig(
        num_experts=4, num_chosen=2, intermediate_size=8, scoring="softmax_chosen"
    )
    experts = Experts(config, ExpertsWeights(object(), None, None, (), None, None))  # type: ignore[arg-type]
    logits = np.array([[3.0, 1.0, 0.5, 0.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    assert experts.margin(logits).tolist() == [0.5, 0.0]
    chosen, weights = experts.route(logits)
    assert chosen.tolist() == [[0, 1], [0, 1]]
    assert np.allclose(weights[1], 0.5)
