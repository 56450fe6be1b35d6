"""Native kernels against the machine's own limits, all measured in one run.

    python benchmarks/kernels.py [--threads N] [--path avx512] [--repeat 20] [--only matmul] [--torch] [--json]

Decode rows are bound by reading memory: the table says which share of the measured read bandwidth
they reach (weights, or live keys and values, over time). Rows with many tokens are bound by
arithmetic: the share of the measured int8, bf16 or float32 rate. Times are the least of the
repetitions, since anything else on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, AttendParams, HostTensor, PagedStream

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 576, 1536, 9, 3, 64
QUANTISED = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Limits:
    """What the machine can do with this many threads."""

    read_bytes_per_s: float
    int8_ops_per_s: float
    bf16_ops_per_s: float
    fp32_ops_per_s: float


@dataclass(frozen=True)
class Row:
    """One measurement; `share` of the limit that `bound` names."""

    case: str
    seconds: float
    rate: float
    unit: str
    bound: str
    share: float


@dataclass(frozen=True)
class Timer:
    """Runs things some times and keeps the fastest."""

    repeat: int
    clock: Callable[[], float]

    def least(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest run."""
        times = []
        for _ in range(self.repeat):
            start = self.clock()
            run()
            times.append(self.clock() - start)
        return min(times)


def measure_limits(backend: NativeBackend, timer: Timer) -> Limits:
    """Read bandwidth beyond the caches, and arithmetic in registers."""
    runtime = backend._runtime
    data = np.ones(128 << 20, np.uint8)
    reads = timer.least(partial(runtime.time_reads, data))
    rates = []
    for kind in range(3):
        _, operations = runtime.time_arithmetic(kind, 100_000)
        rates.append(operations / timer.least(partial(runtime.time_arithmetic, kind, 100_000)))
    return Limits(data.nbytes / reads, *rates)


def random_weight(element_type: str, rows: int, cols: int, seed: int) -> HostTensor:
    """Random bits with small scales."""
    rng = np.random.default_rng(seed)
    if element_type == "F32":
        data = rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint8)
    elif element_type in ("F16", "BF16"):
        data = rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8)
        data[..., 1::2] &= 0xBF
    else:
        features, size = QUANTISED[element_type]
        data = rng.integers(0, 256, (rows, cols // features, size), dtype=np.uint8)
        data[..., 208 if element_type == "Q6_K" else 0 :][..., :2] = (0x00, 0x20)
    return HostTensor("w", element_type, rows, cols, data.reshape(-1))


def matmul_rows(backend: NativeBackend, limits: Limits, timer: Timer) -> Iterator[Row]:
    """A 30-layer model's weights for one token, then one weight for 8 and for 512."""
    runtime = backend._runtime
    for element_type in (*QUANTISED, "BF16", "F16", "F32"):
        scale = 256 / 192 if element_type.endswith("_K") else 1  # rows of whole 256-blocks
        hidden = int(HIDDEN * scale)
        shapes = [(960, hidden), (hidden, hidden), (2 * INNER, hidden), (hidden, INNER)]
        weights = []
        for layer in range(30):
            for rows, cols in shapes:
                tensor = random_weight(element_type, rows, cols, layer)
                x = np.random.default_rng(0).standard_normal((1, cols)).astype(np.float32)
                weights.append(
                    (backend.prepare([tensor], "auto"), x, np.empty((1, rows), np.float32))
                )

        def token(weights: list = weights) -> None:
            for weight, x, out in weights:
                runtime.matmul(x, weight, out)

        total = sum(weight.nbytes_owned for weight, _, _ in weights)
        seconds = timer.least(token)
        rate = total / seconds
        yield Row(
            f"matmul {element_type}, 1 token, {total / 1e6:.0f} MB",
            seconds,
            rate / 1e9,
            "GB/s",
            "reads",
            rate / limits.read_bytes_per_s,
        )
        weight = weights[2][0]
        bound = "int8" if element_type in QUANTISED else "fp32"
        limit = limits.int8_ops_per_s if bound == "int8" else limits.fp32_ops_per_s
        for tokens in (8, 512):
            x = np.random.default_rng(0).standard_normal((tokens, hidden)).astype(np.float32)
            out = np.empty((tokens, 2 * INNER), np.float32)
            seconds = timer.least(partial(runtime.matmul, x, weight, out))
            rate = 2.0 * tokens * hidden * 2 * INNER / seconds
            case = f"matmul {element_type}, {tokens} tokens"
            yield Row(case, seconds, rate / 1e9, "Gop/s", bound, rate / limit)


@dataclass
class Context:
    """Sequences of one length in a slab of many layers, at scattered blocks."""

    layers: list[tuple[PagedStream, PagedStream]]
    tables: np.ndarray
    length: int

    def batch(self, num_tokens: int) -> AttendBatch:
        """The last tokens of every sequence as queries."""
        num_seqs = len(self.tables)
        positions = np.tile(np.arange(self.length - num_tokens, self.length), num_seqs)
        return AttendBatch(
            np.arange(num_seqs + 1, dtype=np.int32) * np.int32(num_tokens),
            np.full(num_seqs, self.length, np.int32),
            self.tables,
            positions.astype(np.int32),
            np.zeros(len(positions), np.int64),
        )


def make_context(
    length: int, num_seqs: int, dtype: str, num_layers: int, block_size: int = 16
) -> Context:
    """A slab filled with small numbers (1.0 in every element)."""
    per_seq = -(-length // block_size)
    half = KV_HEADS * block_size * DIM * WIDTHS[dtype]
    pages = np.empty((per_seq * num_seqs + 1, num_layers * 2 * half), np.uint8)
    one = {"fp32": b"\x00\x00\x80\x3f", "fp16": b"\x00\x3c", "bf16": b"\x80\x3f"}[dtype]
    pages.reshape(-1, len(one))[:] = np.frombuffer(one, np.uint8)
    ids = np.random.default_rng(0).permutation(per_seq * num_seqs) + 1
    layers = [
        tuple(
            PagedStream(pages, (2 * i + part) * half, dtype, KV_HEADS, block_size, DIM)
            for part in (0, 1)
        )
        for i in range(num_layers)
    ]
    return Context(layers, ids.astype(np.int32).reshape(num_seqs, per_seq), length)


def attend_rows(backend: NativeBackend, limits: Limits, timer: Timer) -> Iterator[Row]:
    """Decoding over contexts and batches, and prompts in chunks."""
    params = AttendParams(scale=DIM**-0.5)
    rng = np.random.default_rng(0)
    is_wide = backend.kernel_path == "avx512"
    for dtype in WIDTHS:
        for length, num_seqs in ((512, 1), (7500, 1), (512, 32), (2048, 8)):
            num_layers = max(
                1, min(30, (256 << 20) // (length * num_seqs * KV_HEADS * DIM * 2 * WIDTHS[dtype]))
            )
            context = make_context(length, num_seqs, dtype, num_layers)
            q = rng.standard_normal((num_seqs, HEADS, DIM)).astype(np.float32)
            out, batch = np.empty_like(q), context.batch(1)

            def step(context: Context = context, q=q, out=out, batch=batch) -> None:
                for keys, values in context.layers:
                    backend.attend(q, keys, values, batch, params, out)

            seconds = timer.least(step)
            total = length * num_seqs * KV_HEADS * DIM * 2 * WIDTHS[dtype] * num_layers
            rate = total / seconds
            yield Row(
                f"attend {dtype}, {num_seqs} x {length}, 1 token",
                seconds / num_layers,
                rate / 1e9,
                "GB/s",
                "reads",
                rate / limits.read_bytes_per_s,
            )
        for tokens, length in ((512, 512), (2048, 2048), (512, 7500), (16, 7500)):
            context = make_context(length, 1, dtype, 1)
            q = rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32)
            out, batch = np.empty_like(q), context.batch(tokens)
            keys, values = context.layers[0]
            seconds = timer.least(partial(backend.attend, q, keys, values, batch, params, out))
            pairs = backend.attend(q, keys, values, batch, params, out)
            rate = 4.0 * pairs * HEADS * DIM / seconds
            bound = "bf16" if dtype == "bf16" and is_wide else "fp32"
            limit = limits.bf16_ops_per_s if bound == "bf16" else limits.fp32_ops_per_s
            yield Row(
                f"attend {dtype}, {tokens} tokens at {length}",
                seconds,
                rate / 1e9,
                "Gop/s",
                bound,
                rate / limit,
            )


def torch_rows(threads: int, limits: Limits, timer: Timer) -> Iterator[Row]:
    """torch's scaled_dot_product_attention on dense tensors of the same work."""
    import torch

    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for tokens, length in ((1, 7500), (2048, 2048)):
            q = torch.randn(1, HEADS, tokens, DIM, dtype=dtype)
            k, v = (torch.randn(1, KV_HEADS, length, DIM, dtype=dtype) for _ in range(2))
            causal = tokens > 1
            with torch.inference_mode():
                seconds = timer.least(partial(attend, q, k, v, is_causal=causal, enable_gqa=True))
            if tokens == 1:
                rate = 2.0 * k.numel() * k.element_size() / seconds
                yield Row(
                    f"torch sdpa {name}, 1 x {length}, 1 token",
                    seconds,
                    rate / 1e9,
                    "GB/s",
                    "reads",
                    rate / limits.read_bytes_per_s,
                )
            else:
                rate = 4.0 * tokens * (tokens + 1) / 2 * HEADS * DIM / seconds
                limit = limits.bf16_ops_per_s if name == "bf16" else limits.fp32_ops_per_s
                yield Row(
                    f"torch sdpa {name}, {tokens} tokens at {length}",
                    seconds,
                    rate / 1e9,
                    "Gop/s",
                    name,
                    rate / limit,
                )


def main() -> None:
    """Run everything and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--path", default=None, help="avx512, avx2 or portable")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--only", choices=("matmul", "attend"), help="one kind of kernel")
    parser.add_argument("--torch", action="store_true", help="torch's attention too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's CPU time: for one thread on a machine that others use too",
    )
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    backend = NativeBackend(arguments.threads, arguments.path)
    timer = Timer(arguments.repeat, time.process_time if arguments.cpu_time else time.perf_counter)
    limits = measure_limits(backend, timer)
    head = f"{backend.kernel_path}, {backend.num_threads} threads"
    print(
        f"{head}: reads {limits.read_bytes_per_s / 1e9:.1f} GB/s, int8 {limits.int8_ops_per_s / 1e9:.0f}, "
        f"bf16 {limits.bf16_ops_per_s / 1e9:.0f}, fp32 {limits.fp32_ops_per_s / 1e9:.0f} Gop/s",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    sources = []
    if arguments.only in (None, "matmul"):
        sources.append(matmul_rows(backend, limits, timer))
    if arguments.only in (None, "attend"):
        sources.append(attend_rows(backend, limits, timer))
    if arguments.torch:
        sources.append(torch_rows(backend.num_threads, limits, timer))
    rows = []
    for source in sources:
        for row in source:
            rows.append(row)
            if not arguments.json:
                print(
                    f"{row.case:38} {row.seconds * 1e3:9.3f} ms {row.rate:8.1f} {row.unit:6}"
                    f" {row.share:5.0%} of {row.bound}",
                    flush=True,
                )
    if arguments.json:
        result = {
            "path": backend.kernel_path,
            "threads": backend.num_threads,
            "limits": asdict(limits),
        }
        print(json.dumps(result | {"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
