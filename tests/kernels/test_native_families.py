"""Native experts, products per head, routing, gates and norms on views: right, and row by row the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvern.kernels.family_protocol import GATES, ExpertParts, Routing
from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import Backend
from kvern.kernels.reference import ReferenceBackend

from .native_cases import PATHS, random_tensor

pytestmark = pytest.mark.usefixtures("require_native")

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 29, 96, 64, 7, 3
Operation = Callable[[Backend, np.ndarray], np.ndarray]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def view(width: int, columns: int, seed: int = 0) -> np.ndarray:
    """Columns of wider rows: neighbouring rows do not touch."""
    return numbers(TOKENS, width, seed=seed)[:, 1 : 1 + columns]


def assert_row_invariant(make: Callable[[Backend, slice], np.ndarray], path: str) -> np.ndarray:
    """All rows at once, some, and each alone, on any number of threads."""
    whole = make(NativeBackend(1, path), slice(None))
    for threads in (2, 3, 8):
        backend = NativeBackend(threads, path)
        assert make(backend, slice(None)).tobytes() == whole.tobytes()
        for start, stop in ((0, 1), (4, 6), (3, 12), (TOKENS - 1, TOKENS)):
            assert make(backend, slice(start, stop)).tobytes() == whole[start:stop].tobytes()
    return whole


def experts_of(backend: Backend, types: tuple[str, ...], **fields: Any) -> Any:
    is_gated = fields.get("is_gated", True)
    wide = (2 if is_gated else 1) * INNER
    gate_up = [random_tensor(types[e % len(types)], wide, HIDDEN, e) for e in range(EXPERTS)]
    down = [random_tensor(types[e % len(types)], HIDDEN, INNER, 50 + e) for e in range(EXPERTS)]
    has_bias = fields.pop("has_bias", False)
    forms = fields.pop("weights_format", "auto")
    forms = (forms,) if isinstance(forms, str) else forms
    biases = [
        [numbers(size, seed=e) if has_bias else None for e in range(EXPERTS)]
        for size in (wide, HIDDEN)
    ]
    values = {"activation": "silu", **fields}
    return backend.group_experts(
        ExpertParts(
            [backend.prepare([t], forms[e % len(forms)]) for e, t in enumerate(gate_up)],
            [backend.prepare([t], forms[e % len(forms)]) for e, t in enumerate(down)],
            *biases,
            **values,
        )
    )


EXPERT_CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "float": (("F32",), {}),
    "half": (("BF16",), {"has_bias": True, "activation": "clamped_swiglu"}),
    "quantised": (("Q4_1",), {"has_bias": True}),
    "mixed types": (("Q8_0", "F16", "Q4_0"), {"scales_input": True}),
    "all forms": (("Q8_0", "F32", "Q8_0"), {"weights_format": ("auto", "fp32", "bf16")}),
    "rounded to bf16": (("Q8_0", "F32"), {"weights_format": "bf16", "has_bias": True}),
    "not gated": (("Q8_0",), {"is_gated": False, "activation": "relu2"}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(EXPERT_CASES))
def test_experts(name: str, path: str) -> None:
    types, fields = EXPERT_CASES[name]
    rng = np.random.default_rng(3)
    ids = np.sort([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)], -1).astype(np.int32)
    x, weights = numbers(TOKENS, HIDDEN), np.abs(numbers(TOKENS, CHOSEN, seed=8))

    def run(backend: Backend, rows: slice) -> np.ndarray:
        out = np.full((TOKENS, HIDDEN), np.nan, np.float32)[rows]
        group = experts_of(backend, types, **fields)
        backend.experts(x[rows], ids[rows], weights[rows], group, out)
        return out

    ours, theirs = assert_row_invariant(run, path), run(ReferenceBackend(), slice(None))
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < (2e-6 if types[0] in ("F32", "BF16") else 0.03)  # int8 (or bf16) activations


def test_one_expert_may_take_all_tokens_and_many_tokens_go_in_pieces() -> None:
    backend = NativeBackend(2)
    group = experts_of(backend, ("Q8_0",))
    count = 40_000  # more rows than the experts' buffer holds at once
    x = np.tile(numbers(TOKENS, HIDDEN), (count // TOKENS + 1, 1))[:count]
    ids = np.tile(np.array([[2, 4, 6]], np.int32), (count, 1))
    weights = np.ones((count, CHOSEN), np.float32)
    out = np.empty_like(x)
    backend.experts(x, ids, weights, group, out)
    few = np.empty((TOKENS, HIDDEN), np.float32)
    backend.experts(x[:TOKENS], ids[:TOKENS], weights[:TOKENS], group, few)
    assert (out.reshape(-1)[: few.size] == few.reshape(-1)).all()
    assert (out[-1] == few[(count - 1) % TOKENS]).all()
    with pytest.raises(ValueError, match="expert 7 is not one of 7"):
        backend.experts(x[:1], ids[:1] + np.int32(1), weights[:1], group, out[:1])


ROUTINGS = {
    "softmax": {"scoring": "softmax", "is_normalized": True},
    "softmax_chosen": {"scoring": "softmax_chosen"},
    "sigmoid": {"scoring": "sigmoid", "is_normalized": True, "scale": 2.5, "num_groups": 4}
    | {"num_chosen_groups": 2, "group_score": "top2"},
    "groups by the best": {"scoring": "softmax", "num_groups": 4, "num_chosen_groups": 3},
    "sigmoid_chosen": {"scoring": "sigmoid_chosen"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("name", sorted(ROUTINGS))
def test_routing(name: str, has_biases: bool, path: str) -> None:
    base = Routing(24, 5, "softmax", False, 1.0)
    biases = {"score_bias": numbers(24, seed=5), "expert_scale": numbers(24, seed=6)}
    routing = replace(base, **ROUTINGS[name], **(biases if has_biases else {}))
    logits = numbers(TOKENS, 24)
    logits[3] = 1.5  # all alike: the lower ids
    logits[4, ::2] = logits[4, 0]

    def run(backend: Backend, rows: slice) -> np.ndarray:
        own = np.ascontiguousarray(logits[rows])
        ids, weights = np.empty((len(own), 5), np.int32), np.empty((len(own), 5), np.float32)
        backend.route(own, routing, ids, weights)
        return np.concatenate([ids, weights], axis=1, dtype=np.float32, casting="unsafe")

    ours, theirs = assert_row_invariant(run, path), run(ReferenceBackend(), slice(None))
    assert (ours[:, :5] == theirs[:, :5]).all()
    assert (np.diff(ours[:, :5], axis=1) > 0).all()
    assert np.allclose(ours[:, 5:], theirs[:, 5:], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("element_type", "weights_format", "limit"),
    [
        ("F32", "auto", 2e-6),
        ("BF16", "auto", 2e-6),
        ("Q4_0", "auto", 0.02),
        ("Q8_0", "auto", 0.02),
        ("Q8_0", "bf16", 0.01),
    ],
)
def test_products_per_head(element_type: str, weights_format: str, limit: float, path: str) -> None:
    heads, rows_out = 5, 40
    x = numbers(TOKENS, heads, 70)[:, :, 2:66]

    def run(backend: Backend, rows: slice) -> np.ndarray:
        tensors = [random_tensor(element_type, rows_out, 64, h) for h in range(heads)]
        group = backend.group_heads([backend.prepare([t], weights_format) for t in tensors])
        wide = np.full((TOKENS, heads, rows_out + 9), np.nan, np.float32)
        backend.matmul_heads(x[rows], group, wide[rows, :, :rows_out])
        assert np.isnan(wide[..., rows_out:]).all()
        return np.ascontiguousarray(wide[rows, :, :rows_out])

    ours, theirs = assert_row_invariant(run, path), run(ReferenceBackend(), slice(None))
    assert np.abs(ours - theirs).max() < limit * np.abs(theirs).max()


def rowwise() -> dict[str, Operation]:
    """Operations on a view of 53 columns, in place."""
    other = view(60, 53, seed=1)
    weight, bias = numbers(53, seed=2), numbers(53, seed=3)

    def gate(kind: str) -> Operation:
        def run(backend: Backend, x: np.ndarray) -> np.ndarray:
            backend.gate(x, kind, other[: len(x)], x)
            return x

        return run

    def alone(backend: Backend, x: np.ndarray) -> np.ndarray:
        backend.gate(x, "gelu", None, x)
        return x

    def by_one(backend: Backend, x: np.ndarray) -> np.ndarray:
        backend.gate(np.ascontiguousarray(x[:, :1]), "sigmoid", x, x)
        return x

    def norm(is_centered: bool, has_bias: bool) -> Operation:
        def run(backend: Backend, x: np.ndarray) -> np.ndarray:
            backend.norm(x, weight, bias if has_bias else None, 1e-5, is_centered, x)
            return x

        return run

    def heads(backend: Backend, x: np.ndarray) -> np.ndarray:
        parts = x[:, :51].reshape(len(x), 3, 17)
        backend.norm(parts, weight[:51], None, 1e-5, False, parts)
        return x

    def biased(backend: Backend, x: np.ndarray) -> np.ndarray:
        backend.add_bias(x, bias)
        backend.scale(x, 0.3)
        return x

    def capped(backend: Backend, x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x)
        backend.softcap(x, 1.5)
        return x

    return (
        {f"gate {kind}": gate(kind) for kind in GATES}
        | {"alone": alone, "by one": by_one, "heads": heads, "biased": biased, "capped": capped}
        | {f"norm {c} {b}": norm(c, b) for c in (False, True) for b in (False, True)}
    )


ROWWISE = rowwise()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(ROWWISE))
def test_operations_on_views(name: str, path: str) -> None:
    def run(backend: Backend, rows: slice) -> np.ndarray:
        x = view(70, 53)[rows] if name.startswith(("norm", "heads", "biased")) else view(70, 53)
        result = ROWWISE[name](backend, x)
        return np.ascontiguousarray(result if len(result) < TOKENS else result[rows])

    ours, theirs = assert_row_invariant(run, path), run(ReferenceBackend(), slice(None))
    assert np.allclose(ours, theirs, rtol=2e-5, atol=3e-6)


def test_positions_choose_factors_and_rows() -> None:
    positions = np.array([0, 7, 8, 40], np.int32)
    table = random_tensor("BF16", 44, 32)
    ours, theirs = NativeBackend(2), ReferenceBackend()
    results = []
    for backend in (ours, theirs):
        x, rows = numbers(4, 3, 20)[:, :, :20], np.empty((4, 32), np.float32)
        backend.scale_by_position(x, positions, 8.0, 0.1, 1.0)
        backend.embed_positions(backend.prepare([table], "auto"), positions, 2, rows)
        moved = np.zeros((4, 3, 25), np.float32)
        backend.copy(x, moved[:, :, 5:])
        results.append((moved, rows))
    assert np.allclose(results[0][0], results[1][0], rtol=1e-6)
    assert (results[0][1] == results[1][1]).all()
    weight, out = ours.prepare([table], "auto"), np.empty((4, 32), np.float32)
    with pytest.raises(ValueError, match="position 40 is outside the rotary table of 39"):
        ours.embed_positions(weight, positions, 5, out)
