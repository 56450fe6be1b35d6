"""What bit-exactness costs per kind of layer: the exact form against the form it gives up.

Run: ``python benchmarks/families.py [--json]``. Native backend, bfloat16 weights, random numbers in the
geometry of real models; the least of several runs, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, AttendParams, HostTensor, PagedStream, Weight
from kvern.kernels.reference_state import gated_delta_rule, selective_scan
from kvern.store.dtypes import encode

BLOCK_SIZE = 16
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Random float32."""
    return RNG.normal(0, 0.05, shape).astype(np.float32)


def weight(backend: NativeBackend, rows: int, cols: int) -> Weight:
    """A random bfloat16 matrix."""
    data = encode(numbers(rows, cols), "bf16").reshape(-1)
    return backend.prepare([HostTensor("w", "BF16", rows, cols, data)], "auto")


def least(run: Callable[[], object], repeats: int = 5) -> float:
    """Milliseconds of the quickest of several runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - started))
    return min(times)


def stream(heads: int, dim: int, num_tokens: int) -> PagedStream:
    """A filled bfloat16 stream."""
    num_blocks = 1 + num_tokens // BLOCK_SIZE
    rows = encode(numbers(num_blocks * heads * BLOCK_SIZE, dim), "bf16")
    return PagedStream(rows.reshape(num_blocks, -1), 0, "bf16", heads, BLOCK_SIZE, dim)


def batch(num_queries: int, num_tokens: int) -> AttendBatch:
    """One sequence whose last ``num_queries`` tokens are computed."""
    positions = np.arange(num_tokens - num_queries, num_tokens, dtype=np.int32)
    table = np.arange(1, 1 + num_tokens // BLOCK_SIZE, dtype=np.int32)[None]
    slots = table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    seq_lens = np.array([num_tokens], np.int32)
    return AttendBatch(np.array([0, num_queries], np.int32), seq_lens, table, positions, slots)


def latent(backend: NativeBackend, num_queries: int, num_tokens: int) -> dict[str, float]:
    """DeepSeek-V2-Lite: 16 heads of 128 + 64, latent 512; absorbed, and with heads expanded anew."""
    heads, nope, rope, dim, value = 16, 128, 64, 512, 128
    ups = [weight(backend, dim, nope) for _ in range(heads)]
    downs = [weight(backend, value, dim) for _ in range(heads)]
    expand = weight(backend, heads * (nope + value), dim)
    step, params = batch(num_queries, num_tokens), AttendParams((nope + rope) ** -0.5)
    entries = stream(1, dim + rope, num_tokens)
    keys, values = stream(heads, nope + rope, num_tokens), stream(heads, value, num_tokens)
    part, up = numbers(num_queries, nope), numbers(num_queries, dim)
    query, wide = numbers(num_queries, heads, dim + rope), numbers(num_queries, heads, dim + rope)
    back, own = numbers(num_queries, dim), numbers(num_queries, value)
    expanded_query, out = (
        numbers(num_queries, heads, nope + rope),
        numbers(num_queries, heads, value),
    )
    past, unpacked = numbers(num_tokens, dim), numbers(num_tokens, heads * (nope + value))

    def absorbed() -> None:
        for each in ups:
            backend.matmul(part, each, up)
        backend.attend(query, entries, entries, step, params, wide)
        for each in downs:
            backend.matmul(back, each, own)

    def expanded() -> None:
        backend.matmul(past, expand, unpacked)
        backend.attend(expanded_query, keys, values, step, params, out)

    return {"exact_ms": least(absorbed), "other_ms": least(expanded)}


def experts(backend: NativeBackend, num_tokens: int) -> dict[str, float]:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768; grouped by expert, and one dense part as wide."""
    hidden, inner, chosen, count = 2048, 768, 8, 32
    gate_ups = [weight(backend, 2 * inner, hidden) for _ in range(count)]
    downs = [weight(backend, hidden, inner) for _ in range(count)]
    dense_up = weight(backend, 2 * inner * chosen, hidden)
    dense_down = weight(backend, hidden, inner * chosen)
    x, total = numbers(num_tokens, hidden), numbers(num_tokens, hidden)
    routes = np.stack([RNG.permutation(count)[:chosen] for _ in range(num_tokens)])

    def routed() -> None:
        total[...] = 0
        for expert in np.unique(routes):
            rows = np.nonzero(routes == expert)[0]
            gate_up = np.empty((len(rows), 2 * inner), np.float32)
            activated = np.empty((len(rows), inner), np.float32)
            result = np.empty((len(rows), hidden), np.float32)
            backend.matmul(x[rows], gate_ups[expert], gate_up)
            backend.gated_activation(gate_up, "silu", activated)
            backend.matmul(activated, downs[expert], result)
            total[rows] += result

    wide = numbers(num_tokens, 2 * inner * chosen)
    narrow = numbers(num_tokens, inner * chosen)

    def dense() -> None:
        backend.matmul(x, dense_up, wide)
        backend.gated_activation(wide, "silu", narrow)
        backend.matmul(narrow, dense_down, total)

    return {"exact_ms": least(routed), "other_ms": least(dense)}


def states(num_tokens: int) -> dict[str, dict[str, float]]:
    """Token by token: Qwen3-Next's delta net (32 heads of 128 x 128), Granite 4 H's Mamba-2."""
    heads, key, value = 32, 128, 128
    qkv = [numbers(num_tokens, heads, dim) for dim in (key, key, value)]
    gates = [np.full((num_tokens, heads), x, np.float32) for x in (0.95, 0.5)]
    delta = lambda: gated_delta_rule(*qkv, *gates, numbers(heads, key, value), "fp32")  # noqa: E731
    x, b, c = (
        numbers(num_tokens, 64, 64),
        numbers(num_tokens, 64, 128),
        numbers(num_tokens, 64, 128),
    )
    steps = [np.full((num_tokens, 64), v, np.float32) for v in (0.1, 0.95)]
    scan = lambda: selective_scan(x, *steps, b, c, numbers(64, 64, 128), "fp32")  # noqa: E731
    return {
        "gated delta net": {"exact_ms": least(delta, 3) / num_tokens},
        "Mamba-2": {"exact_ms": least(scan, 3) / num_tokens},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    backend = NativeBackend()
    results: dict[str, dict[str, float]] = {
        "latent, 1 token, 4,096 cached": latent(backend, 1, 4096),
        "latent, 256 tokens, 4,096 cached": latent(backend, 256, 4096),
        "latent, 256 tokens, none cached": latent(backend, 256, 256),
        "experts, 1 token": experts(backend, 1),
        "experts, 64 tokens": experts(backend, 64),
    }
    results |= {f"{kind}, per token": row for kind, row in states(16).items()}
    if as_json:
        print(json.dumps({"backend": backend.kernel_path, "results": results}))
        return
    for name, row in results.items():
        print(name.ljust(36), "  ".join(f"{k} {v:9.3f}" for k, v in row.items()))


if __name__ == "__main__":
    main()
