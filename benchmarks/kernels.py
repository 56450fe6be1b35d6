"""Native kernels against the machine's own limits, all measured in one run.

    python benchmarks/kernels.py [--threads N] [--path avx512] [--repeat 20] [--only matmul] [--torch] [--json]

Decode rows are bound by reading memory: the table says which share of the measured read bandwidth
they reach (weights, or live keys and values, over time). Rows with many tokens are bound by
arithmetic: the share of the measured int8, bf16 or float32 rate. Times are the least of the
repetitions, since anything else on the machine only adds to them.

Attention walks the layers of a model in turn, so that keys come from memory, over blocks in random
order. torch's scaled_dot_product_attention gets each layer contiguous, which is its best case. torch
chooses the order of its sums by shape and threads; what lies between its rates and ours is the price,
or the gain, of an order that never depends on the batch.
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

from kvern.bench.limits import READ_BYTES
from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, AttendParams, HostTensor, PagedStream
from kvern.spec.codec import KV_FORMATS
from kvern.store.streams import OpenForm

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
FORMATS = ("bf16", "int8", "fp16", "fp32")
SIZES = ((512, 1), (2048, 1), (7500, 1), (512, 8), (2048, 8), (512, 32))
PROMPTS = ((512, 512), (2048, 2048), (512, 7500), (16, 7016))


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
    data = np.ones(READ_BYTES, np.uint8)
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
    elif element_type == "F16":
        data = rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8)
    elif element_type == "BF16":  # the upper halves of floats
        data = (
            (rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint8)
        )
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
            seats=np.arange(num_seqs, dtype=np.int32),
        )


def kv_bytes(kv_format: str, tokens: int) -> int:
    """Bytes of one layer's keys and values."""
    return sum(codec.stored_bytes(tokens, KV_HEADS, DIM) for codec in KV_FORMATS[kv_format])


def make_context(
    length: int,
    num_seqs: int,
    kv_format: str,
    num_layers: int,
    num_tokens: int,
    block_size: int = 16,
) -> Context:
    """A slab whose vectors are all ones (int8: codes of 127, scales of 1 / 127)."""
    per_seq = -(-length // block_size)
    codec = KV_FORMATS[kv_format][0]
    half = codec.stored_bytes(block_size, KV_HEADS, DIM)
    open_half = KV_HEADS * DIM * block_size * 2
    pages = np.empty((per_seq * num_seqs + 1, num_layers * 2, half), np.uint8)
    data, *scales = codec.regions(block_size, KV_HEADS, DIM)
    ones = {"fp32": (0, 0, 0x80, 0x3F), "fp16": (0, 0x3C), "bf16": (0x80, 0x3F), "int8": (0x7F,)}
    one = np.array(ones[kv_format], np.uint8)
    pages[..., : data.num_bytes] = np.tile(one, data.num_bytes // len(one))
    for region in scales:
        part = np.full(region.num_bytes // 4, 1 / 127, np.float32).view(np.uint8)
        pages[..., region.offset : region.offset + region.num_bytes] = part
    pages = pages.reshape(len(pages), -1)
    opened = np.zeros((num_seqs, 2 * open_half), np.uint8)
    rows = np.zeros((num_seqs * num_tokens, KV_HEADS, 2 * DIM), np.uint8)

    def stream(layer: int, part: int) -> PagedStream:
        place = None if codec.is_wide else OpenForm(opened, part * open_half, rows)
        stored = None if codec.is_wide else codec
        at = (2 * layer + part) * half
        return PagedStream(pages, at, kv_format, KV_HEADS, block_size, DIM, stored, place)

    ids = np.random.default_rng(0).permutation(per_seq * num_seqs) + 1
    layers = [(stream(i, 0), stream(i, 1)) for i in range(num_layers)]
    return Context(layers, ids.astype(np.int32).reshape(num_seqs, per_seq), length)


def layers_for(kv_format: str, length: int, num_seqs: int) -> int:
    """As many layers as make keys and values come from memory, 30 at most."""
    return max(1, min(30, (256 << 20) // (num_seqs * kv_bytes(kv_format, length))))


def reading(case: str, seconds: float, num_bytes: int, limits: Limits) -> Row:
    """A row that memory bounds."""
    rate = num_bytes / seconds
    return Row(case, seconds, rate / 1e9, "GB/s", "reads", rate / limits.read_bytes_per_s)


def attend_rows(backend: NativeBackend, limits: Limits, timer: Timer) -> Iterator[Row]:
    """Decoding over contexts, batches and formats, and prompts in chunks."""
    params = AttendParams(scale=DIM**-0.5)
    rng = np.random.default_rng(0)
    is_wide = backend.kernel_path in ("amx", "avx512")
    for length, num_seqs in SIZES:
        for kv_format in FORMATS:
            num_layers = layers_for(kv_format, length, num_seqs)
            context = make_context(length, num_seqs, kv_format, num_layers, 1)
            q = rng.standard_normal((num_seqs, HEADS, DIM)).astype(np.float32)
            out, batch = np.empty_like(q), context.batch(1)

            def step(context: Context = context, q=q, out=out, batch=batch) -> None:
                for keys, values in context.layers:
                    backend.attend(q, keys, values, batch, params, out)

            seconds = timer.least(step) / num_layers
            total = num_seqs * kv_bytes(kv_format, length)
            yield reading(
                f"attend {kv_format}, {num_seqs} x {length}, 1 token", seconds, total, limits
            )
    for tokens, length in PROMPTS:
        for kv_format in FORMATS:
            context = make_context(length, 1, kv_format, 1, tokens)
            q = rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32)
            out, batch = np.empty_like(q), context.batch(tokens)
            keys, values = context.layers[0]
            seconds = timer.least(partial(backend.attend, q, keys, values, batch, params, out))
            pairs = backend.attend(q, keys, values, batch, params, out)
            rate = 4.0 * pairs * HEADS * DIM / seconds
            bound = "bf16" if kv_format == "bf16" and is_wide else "fp32"
            limit = limits.bf16_ops_per_s if bound == "bf16" else limits.fp32_ops_per_s
            case = f"attend {kv_format}, {tokens} tokens at {length}"
            yield Row(case, seconds, rate / 1e9, "Gop/s", bound, rate / limit)


def torch_products(threads: int, limits: Limits, timer: Timer) -> Iterator[Row]:
    """torch's linear layers at the shapes of `matmul_rows`: products free to choose their order."""
    import torch

    torch.set_num_threads(threads)
    linear = torch.nn.functional.linear
    for name, dtype in (("BF16", torch.bfloat16), ("F32", torch.float32)):
        shapes = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        layers = [
            (torch.randn(shape, dtype=dtype), torch.randn(1, shape[1], dtype=dtype))
            for shape in 30 * shapes
        ]

        def token(layers: list = layers) -> None:
            with torch.inference_mode():
                for weight, x in layers:
                    linear(x, weight)

        total = sum(weight.numel() * weight.element_size() for weight, _ in layers)
        seconds = timer.least(token)
        yield reading(f"torch linear {name}, 1 token", seconds, total, limits)
        bound = "bf16" if name == "BF16" else "fp32"
        limit = limits.bf16_ops_per_s if bound == "bf16" else limits.fp32_ops_per_s
        for tokens in (8, 512):
            x = torch.randn(tokens, HIDDEN, dtype=dtype)
            with torch.inference_mode():
                seconds = timer.least(partial(linear, x, layers[2][0]))
            rate = 2.0 * tokens * HIDDEN * 2 * INNER / seconds
            yield Row(
                f"torch linear {name}, {tokens} tokens",
                seconds,
                rate / 1e9,
                "Gop/s",
                bound,
                rate / limit,
            )


def torch_attention(threads: int, limits: Limits, timer: Timer) -> Iterator[Row]:
    """torch's scaled_dot_product_attention on dense tensors of the same work."""
    import torch

    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for length, num_seqs in SIZES:
            num_layers = layers_for(name, length, num_seqs)
            q = torch.randn(num_seqs, HEADS, 1, DIM, dtype=dtype)
            kv = torch.ones(num_layers, 2, num_seqs, KV_HEADS, length, DIM, dtype=dtype)

            def step(q=q, kv=kv) -> None:
                with torch.inference_mode():
                    for k, v in kv:
                        attend(q, k, v, enable_gqa=True)

            seconds = timer.least(step) / num_layers
            total = num_seqs * kv_bytes(name, length)
            yield reading(
                f"torch sdpa {name}, {num_seqs} x {length}, 1 token", seconds, total, limits
            )
        for tokens, length in PROMPTS[:2]:
            q = torch.randn(1, HEADS, tokens, DIM, dtype=dtype)
            k, v = (torch.randn(1, KV_HEADS, length, DIM, dtype=dtype) for _ in range(2))
            with torch.inference_mode():
                seconds = timer.least(partial(attend, q, k, v, is_causal=True, enable_gqa=True))
            rate = 4.0 * tokens * (tokens + 1) / 2 * HEADS * DIM / seconds
            bound = "bf16" if name == "bf16" else "fp32"
            limit = limits.bf16_ops_per_s if name == "bf16" else limits.fp32_ops_per_s
            case = f"torch sdpa {name}, {tokens} tokens at {length}"
            yield Row(case, seconds, rate / 1e9, "Gop/s", bound, rate / limit)


def main() -> None:
    """Run everything and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--path", default=None, help="amx, avx512, avx512vnni, avx2 or portable")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--only", choices=("matmul", "attend"), help="one kind of kernel")
    parser.add_argument("--torch", action="store_true", help="torch's products and attention too")
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
    if arguments.torch and arguments.only in (None, "matmul"):
        sources.append(torch_products(backend.num_threads, limits, timer))
    if arguments.torch and arguments.only in (None, "attend"):
        sources.append(torch_attention(backend.num_threads, limits, timer))
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
