"""What bit-exactness costs per kind of layer: the exact form against the form it gives up.

Run: ``python benchmarks/families.py [--threads N] [--cpu-time] [--json]``. Native backend,
bfloat16 weights, random numbers in the geometry of real models; the least of several runs, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from kvern.kernels.family_protocol import (
    DeltaShape,
    ExpertParts,
    Routing,
    ScanShape,
    ScanVectors,
    StatePlace,
)
from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, AttendParams, HostTensor, PagedStream, Weight
from kvern.store.dtypes import encode

BLOCK_SIZE = 16
RNG = np.random.default_rng(0)
CLOCK = time.perf_counter


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
        started = CLOCK()
        run()
        times.append(1000 * (CLOCK() - started))
    return min(times)


def stream(heads: int, dim: int, num_tokens: int) -> PagedStream:
    """A filled bfloat16 stream."""
    num_blocks = 1 + num_tokens // BLOCK_SIZE
    rows = encode(numbers(num_blocks * heads * BLOCK_SIZE, dim), "bf16")
    return PagedStream(rows.reshape(num_blocks, -1), 0, "bf16", heads, BLOCK_SIZE, dim)


def batch(num_queries: int, num_tokens: int) -> AttendBatch:
    """One sequence whose last ``num_queries`` tokens are computed."""
    positions = np.arange(num_tokens - num_queries, num_tokens, dtype=np.int32)
    table = np.arange(1, 1 + -(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None]
    slots = table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    seq_lens = np.array([num_tokens], np.int32)
    return AttendBatch(np.array([0, num_queries], np.int32), seq_lens, table, positions, slots)


def latent(backend: NativeBackend, num_queries: int, num_tokens: int) -> dict[str, float]:
    """DeepSeek-V2-Lite: 16 heads of 128 + 64, latent 512; absorbed, and with heads expanded anew."""
    heads, nope, rope, dim, value = 16, 128, 64, 512, 128
    ups = backend.group_heads([weight(backend, dim, nope) for _ in range(heads)])
    downs = backend.group_heads([weight(backend, value, dim) for _ in range(heads)])
    expand = weight(backend, heads * (nope + value), dim)
    step, params = batch(num_queries, num_tokens), AttendParams((nope + rope) ** -0.5)
    entries = stream(1, dim + rope, num_tokens)
    keys, values = stream(heads, nope + rope, num_tokens), stream(heads, value, num_tokens)
    part = numbers(num_queries, heads, nope)
    query, wide = numbers(num_queries, heads, dim + rope), numbers(num_queries, heads, dim + rope)
    own = numbers(num_queries, heads, value)
    expanded_query, out = (
        numbers(num_queries, heads, nope + rope),
        numbers(num_queries, heads, value),
    )
    past, unpacked = numbers(num_tokens, dim), numbers(num_tokens, heads * (nope + value))

    def absorbed() -> None:
        backend.matmul_heads(part, ups, query[:, :, :dim])
        backend.attend(query, entries, entries, step, params, wide)
        backend.matmul_heads(wide[:, :, :dim], downs, own)

    def expanded() -> None:
        backend.matmul(past, expand, unpacked)
        backend.attend(expanded_query, keys, values, step, params, out)

    return {"exact_ms": least(absorbed), "other_ms": least(expanded)}


def experts(backend: NativeBackend, num_tokens: int) -> dict[str, float]:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768; grouped by expert, and one dense part as wide."""
    hidden, inner, chosen, count = 2048, 768, 8, 32
    none = [None] * count
    group = backend.group_experts(
        ExpertParts(
            gate_up=[weight(backend, 2 * inner, hidden) for _ in range(count)],
            down=[weight(backend, hidden, inner) for _ in range(count)],
            gate_up_bias=none,
            down_bias=none,
            activation="silu",
        )
    )
    dense_up = weight(backend, 2 * inner * chosen, hidden)
    dense_down = weight(backend, hidden, inner * chosen)
    x, total = numbers(num_tokens, hidden), numbers(num_tokens, hidden)
    logits, routing = numbers(num_tokens, count), Routing(count, chosen, "softmax", True, 1.0)
    ids = np.empty((num_tokens, chosen), np.int32)
    weights = np.empty((num_tokens, chosen), np.float32)

    def routed() -> None:
        backend.route(logits, routing, ids, weights)
        backend.experts(x, ids, weights, group, total)

    wide = numbers(num_tokens, 2 * inner * chosen)
    narrow = numbers(num_tokens, inner * chosen)

    def dense() -> None:
        backend.matmul(x, dense_up, wide)
        backend.gated_activation(wide, "silu", narrow)
        backend.matmul(narrow, dense_down, total)

    return {"exact_ms": least(routed), "other_ms": least(dense)}


def states(backend: NativeBackend, num_tokens: int) -> dict[str, dict[str, float]]:
    """Qwen3-Next's delta net (32 heads of 128 x 128), its convolution (8,192 channels), Granite 4 H."""
    step = batch(num_tokens, num_tokens)
    step.block_tables = np.ones((1, 1), np.int32)

    def place(*shape: int) -> StatePlace:
        pages = np.zeros((2, 4 * int(np.prod(shape))), np.uint8)
        return StatePlace(pages, 0, pages.shape[1], "fp32", shape)

    heads, dim = 32, 128
    qkv, gates = numbers(num_tokens, (2 * 16 + heads) * dim), numbers(num_tokens, 2 * heads)
    vectors = ScanVectors(-np.ones(64, np.float32), numbers(64), numbers(64))
    delta_state, shape = place(heads, dim, dim), DeltaShape(16, heads, dim, dim)
    delta_out = numbers(num_tokens, heads * dim)
    xbc, steps, scan_out = (numbers(num_tokens, n) for n in (64 * 64 + 256, 64, 64 * 64))
    scan_state, scan_shape = place(64, 64, 128), ScanShape(64, 1, 64, 128, (0.0, float("inf")))
    taps, tail = numbers(4, 8192), place(8192, 3)
    x, convolved = numbers(num_tokens, 8192), numbers(num_tokens, 8192)

    def delta() -> None:
        decay, bias = vectors.decay[:heads], vectors.step_bias[:heads]
        backend.gated_delta_rule(qkv, gates, decay, bias, shape, delta_state, step, delta_out)

    def scan() -> None:
        backend.selective_scan(xbc, steps, vectors, scan_shape, scan_state, step, scan_out)

    def convolve() -> None:
        backend.convolve(x, taps, None, True, tail, step, convolved)

    work = {"gated delta net": delta, "Mamba-2": scan, "convolution": convolve}
    return {kind: {"exact_ms": least(run) / num_tokens} for kind, run in work.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="on a machine that others use too")
    args = parser.parse_args()
    global CLOCK
    CLOCK = time.process_time if args.cpu_time else time.perf_counter
    backend = NativeBackend(args.threads)
    results: dict[str, dict[str, float]] = {
        "latent, 1 token, 4,096 cached": latent(backend, 1, 4096),
        "latent, 256 tokens, 4,096 cached": latent(backend, 256, 4096),
        "latent, 256 tokens, none cached": latent(backend, 256, 256),
        "experts, 1 token": experts(backend, 1),
        "experts, 64 tokens": experts(backend, 64),
    }
    for count in (1, 256):
        rows = states(backend, count).items()
        results |= {f"{kind}, {count} tokens, each": row for kind, row in rows}
    if args.json:
        print(json.dumps({"backend": backend.kernel_path, "results": results}))
        return
    for name, row in results.items():
        print(name.ljust(36), "  ".join(f"{k} {v:9.3f}" for k, v in row.items()))


if __name__ == "__main__":
    main()
