"""Recorded programs: a step repeated for other tokens gives the bits of the same calls one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvern.kernels.native import NativeBackend, NativeProgram
from kvern.kernels.protocol import AttendBatch, AttendParams, PagedStream, Weight

from .native_cases import PATHS, random_tensor

pytestmark = pytest.mark.usefixtures("require_native")

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, MAX_TOKENS = 96, 6, 2, 32, 160, 300, 64
BLOCK_SIZE, NUM_BLOCKS, POSITIONS = 8, 40, 256


@dataclasses.dataclass
class Layer:
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    norm: np.ndarray
    keys: PagedStream
    values: PagedStream


class TinyDecoder:
    """Two layers with sandwich norms in the second; buffers have room for MAX_TOKENS rows."""

    def __init__(self, backend: NativeBackend, weights_format: str = "auto") -> None:
        self.backend = backend
        rng = np.random.default_rng(0)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.embedding = backend.prepare([random_tensor("Q8_0", VOCAB, HIDDEN)], weights_format)
        stream_bytes = KV_HEADS * BLOCK_SIZE * DIM * 2
        self.pages = np.full((NUM_BLOCKS, 4 * stream_bytes), 0xFF, np.uint8)
        self.layers = [
            Layer(
                backend.prepare([random_tensor("Q4_1", width, HIDDEN, 10 + i)], weights_format),
                backend.prepare(
                    [random_tensor("Q5_0", HIDDEN, HEADS * DIM, 20 + i)], weights_format
                ),
                backend.prepare([random_tensor("F16", 2 * INNER, HIDDEN, 30 + i)], weights_format),
                backend.prepare([random_tensor("Q8_0", HIDDEN, INNER, 40 + i)], weights_format),
                rng.standard_normal(HIDDEN).astype(np.float32),
                *(
                    PagedStream(self.pages, (2 * i + part) * stream_bytes, "bf16", KV_HEADS, 8, DIM)
                    for part in (0, 1)
                ),
            )
            for i in range(2)
        ]
        angles = rng.uniform(-3, 3, (POSITIONS, DIM // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        sizes = {"hidden": HIDDEN, "normed": HIDDEN, "delta": HIDDEN, "qkv": width}
        sizes |= {"attended": HEADS * DIM, "gate_up": 2 * INNER, "activated": INNER}
        self.flat = {name: np.zeros(MAX_TOKENS * n, np.float32) for name, n in sizes.items()}

    def rows(self, name: str, num_tokens: int) -> np.ndarray:
        flat = self.flat[name]
        width = len(flat) // MAX_TOKENS
        return flat[: num_tokens * width].reshape(num_tokens, width)

    def forward(self, ids: np.ndarray, batch: AttendBatch) -> tuple[np.ndarray, int]:
        backend, num_tokens, products = self.backend, len(ids), 0
        hidden, normed = self.rows("hidden", num_tokens), self.rows("normed", num_tokens)
        delta, qkv = self.rows("delta", num_tokens), self.rows("qkv", num_tokens)
        attended = self.rows("attended", num_tokens)
        gate_up, activated = self.rows("gate_up", num_tokens), self.rows("activated", num_tokens)
        heads = qkv.reshape(num_tokens, -1, DIM)
        q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        backend.embed(self.embedding, ids, hidden)
        for index, layer in enumerate(self.layers):
            backend.rms_norm(hidden, layer.norm, 1e-5, normed)
            backend.matmul(normed, layer.qkv, qkv)
            backend.append(v, layer.values, batch)
            backend.rotary(k, batch.positions, self.cos, self.sin, True)
            backend.append(k, layer.keys, batch)
            backend.rotary(q, batch.positions, self.cos, self.sin, True)
            products += backend.attend(
                q,
                layer.keys,
                layer.values,
                batch,
                AttendParams(scale=0.2, window=50 if index else None),
                attended.reshape(num_tokens, HEADS, DIM),
            )
            backend.matmul(attended, layer.output, delta)
            if index:
                backend.rms_norm(delta, layer.norm, 1e-5, normed)
                backend.add(hidden, normed)
            else:
                backend.add(hidden, delta)
            backend.rms_norm(hidden, layer.norm, 1e-5, normed)
            backend.matmul(normed, layer.gate_up, gate_up)
            backend.gated_activation(gate_up, "silu", activated)
            backend.matmul(activated, layer.down, delta)
            backend.add(hidden, delta)
        backend.rms_norm(hidden, self.layers[0].norm, 1e-5, normed)
        return normed, products

    def record(self, ids: np.ndarray, batch: AttendBatch) -> NativeProgram:
        with self.backend.recording(ids, [batch], MAX_TOKENS) as recording:
            self.forward(ids, batch)
        assert recording.program is not None
        return recording.program


def step(*chunks: tuple[int, int]) -> tuple[np.ndarray, AttendBatch]:
    """Token ids and batch for sequences' (start, length); sequence s owns blocks from 1 + 12 s on."""
    starts = np.array([start for start, _ in chunks], np.int32)
    lengths = np.array([length for _, length in chunks], np.int32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.array([np.arange(1, 13) + 12 * s for s in range(len(chunks))], np.int32)
    positions = np.concatenate([np.arange(s, s + n) for s, n in chunks]).astype(np.int32)
    sequence = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    ids = ((positions * 7 + sequence * 31) % VOCAB).astype(np.int32)
    batch = AttendBatch(cu, starts + lengths, tables, positions, slots + positions % BLOCK_SIZE)
    return ids, batch


STEPS = [
    ((0, 9),),
    ((9, 1),),
    ((10, 30), (0, 20)),
    ((40, 1), (20, 1), (0, 1)),
    ((41, 1), (21, 4), (1, 50)),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("threads", "weights_format"), [(1, "auto"), (2, "auto"), (5, "auto"), (3, "bf16")]
)
def test_a_program_repeats_every_step_bit_for_bit(
    path: str, threads: int, weights_format: str
) -> None:
    backend = NativeBackend(threads, path)
    one_by_one, repeated = (TinyDecoder(backend, weights_format) for _ in range(2))
    program = repeated.record(*step((0, 3)))
    assert program.num_ops < 20  # 31 calls were recorded
    assert program.max_positions == POSITIONS
    for chunks in STEPS:
        ids, batch = step(*chunks)
        expected, products = one_by_one.forward(ids, batch)
        assert program.run(ids, [batch]) == products
        assert repeated.rows("normed", len(ids)).tobytes() == expected.tobytes()
        assert repeated.pages.tobytes() == one_by_one.pages.tobytes()


def test_a_program_checks_its_step() -> None:
    decoder = TinyDecoder(NativeBackend(2))
    program = decoder.record(*step((0, 3)))
    before = decoder.pages.copy()
    ids, batch = step((0, 40), (0, 40))
    with pytest.raises(ValueError, match="80 tokens, the program's buffers hold 64"):
        program.run(ids, [batch])
    ids, batch = step((3, 2))
    with pytest.raises(ValueError, match="0 batches, the program reads 1"):
        program.run(ids, [])
    with pytest.raises(ValueError, match="token id 300"):
        program.run(ids + np.int32(VOCAB - ids.max()), [batch])
    far = dataclasses.replace(batch, positions=batch.positions + np.int32(POSITIONS))
    with pytest.raises(ValueError, match="outside the rotary table of 256"):
        program.run(ids, [far])
    with pytest.raises(ValueError, match="outside blocks 1 to 39"):
        program.run(ids, [dataclasses.replace(batch, slot_mapping=batch.slot_mapping * 0)])
    short = dataclasses.replace(
        batch, block_tables=batch.block_tables[:, :1], seq_lens=batch.seq_lens + np.int32(9)
    )
    with pytest.raises(ValueError, match="room for 8 in its block table"):
        program.run(ids, [short])
    assert (decoder.pages == before).all()
    program.run(ids, [batch])


def test_what_another_step_cannot_repeat_makes_no_program() -> None:
    backend = NativeBackend(1)
    ids, batch = step((0, 3))
    x, y = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    with backend.recording(ids, [batch], 8) as recording:
        backend.add(x, y)  # two rows in a step of three
    assert recording.program is None
    other = np.arange(3, dtype=np.int32)
    with backend.recording(ids, [batch], 8) as recording:
        turned = np.ones((3, 1, 4), np.float32)
        backend.rotary(
            turned, other, np.ones((4, 2), np.float32), np.ones((4, 2), np.float32), False
        )
    assert recording.program is None
    with backend.recording(ids[:1], [step((0, 1))[1]], 8) as recording:
        backend.add(x[:1], y[:1])  # one row does not show a view's row width
    assert recording.program is None
    with pytest.raises(RuntimeError), backend.recording(ids, [batch], 8):
        raise RuntimeError
    backend.add(x, y)
    assert x[1, 0] == 3


def test_a_program_keeps_its_arrays_alive() -> None:
    backend = NativeBackend(2)
    ids, batch = step((0, 3))
    decoder = TinyDecoder(backend)
    program = decoder.record(ids, batch)
    expected = decoder.rows("normed", 3).copy()
    normed = decoder.rows("normed", 3)
    normed[...] = 0
    del decoder
    program.run(ids, [batch])
    np.testing.assert_array_equal(normed, expected)
