"""Bugs that other engines had, as tests of their kind; each names its case.

A small random model, float32 throughout. On the native backend logits must be bit-identical, on the
reference backend within 1e-4 of the row's range, with equal greedy tokens on both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import write_tiny_model

from kvern import LLM, AsyncLLM, SamplingParams
from kvern.engine.runner import Observer
from kvern.errors import KvernError
from kvern.kernels.protocol import AttendBatch, AttendParams
from kvern.spec import All, Heads, KVCacheSpec, LayerSpec, ModelSpec, make_kv_plan
from kvern.store.pool import PagedStore

Make = Any
EXACT = {"kv_format": "fp32", "weights_format": "fp32"}


class Logits(Observer):
    """Logits after each position of each request, of the last time it was computed."""

    def __init__(self, llm: LLM) -> None:
        self.rows: dict[tuple[str, int, int], np.ndarray] = {}
        llm.model.runner.observer = self

    def on_logits(self, seq: Any, position: int, row: np.ndarray) -> None:
        self.rows[seq.request.request_id, seq.sample_index, position] = row.copy()

    def of(self, request_id: str, sample: int = 0) -> dict[int, np.ndarray]:
        return {
            p: row for (name, s, p), row in self.rows.items() if (name, s) == (request_id, sample)
        }


class LastLogits(Logits):
    """Only those after what is a sequence's last token at that time: where tokens are chosen."""

    def on_logits(self, seq: Any, position: int, row: np.ndarray) -> None:
        if position == seq.num_tokens - 1:
            super().on_logits(seq, position, row)


def assert_same(llm: LLM, got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits where the backend promises them, else equal within 1e-4 of the range."""
    if llm.model.backend.row_invariant:
        np.testing.assert_array_equal(got, expected)
    else:
        assert np.abs(got - expected).max() <= 1e-4 * np.ptp(expected)


def solo_rows(make: Make, ids: Sequence[int], **options: Any) -> dict[int, np.ndarray]:
    """Logits of every position of a token sequence on a fresh engine, computed in one pass."""
    with make(**{**EXACT, "max_num_batched_tokens": 2048, "kv_memory": "8MiB", **options}) as llm:
        logits = Logits(llm)
        state = llm.submit(ids, SamplingParams(max_tokens=1))
        while state.output is None:
            llm.step()
        return logits.of(state.request_id)


def compare_run(llm: LLM, logits: Logits, state: Any, expected: dict[int, np.ndarray]) -> None:
    rows = logits.of(state.request_id)
    assert rows
    for position, row in rows.items():
        assert_same(llm, row, expected[position])


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def test_pfx_001_hits_and_misses_in_one_batch(make_tiny: Make) -> None:
    prompts = [random_ids(i, 200) for i in range(24)]
    first, second = prompts[:16], [*prompts[:8], *prompts[16:]]
    params = SamplingParams(max_tokens=32)
    big = {**EXACT, "kv_memory": "8MiB"}
    with make_tiny(enable_prefix_caching=False, **big) as plain, make_tiny(**big) as cached:
        for batch in (first, second):
            expected = [out.token_ids for out in plain.generate(batch, params)]
            outs = cached.generate(batch, params)
            assert [out.token_ids for out in outs] == expected
        assert [out.cached_tokens > 16 for out in outs] == [True] * 8 + [False] * 8


@pytest.mark.parametrize("cached", [16, 48, 128, 240])
@pytest.mark.parametrize("new", [1, 2, 15, 16, 17])
def test_pfx_011_a_chunk_that_starts_behind_cached_tokens(
    make_tiny: Make, cached: int, new: int
) -> None:
    ids = random_ids(1, cached + new)
    expected = solo_rows(make_tiny, ids)
    with make_tiny(**EXACT) as llm:
        llm.generate([ids[:cached]], SamplingParams(max_tokens=1))
        logits = Logits(llm)
        state = llm.submit(ids, SamplingParams(max_tokens=1))
        while state.output is None:
            llm.step()
        assert state.output.cached_tokens == min(cached, len(ids) - 1)
        compare_run(llm, logits, state, expected)


def test_det_001_cold_warm_crowded_and_half_replaced_are_one_answer(make_tiny: Make) -> None:
    ids = random_ids(2, 300)
    params = SamplingParams(max_tokens=64)
    with make_tiny(**EXACT, kv_memory="1MiB") as llm:
        logits = Logits(llm)
        runs: list[dict[int, np.ndarray]] = []

        def run(extra: Sequence[list[int]] = ()) -> int:
            states = [llm.submit(ids, params), *(llm.submit(other, params) for other in extra)]
            while any(state.output is None for state in states):
                llm.step()
            runs.append(logits.of(states[0].request_id))
            output = states[0].output
            assert output is not None
            for state in states:
                llm.release(state)
            return output.cached_tokens

        assert run() == 0
        assert run() == 299
        assert run([random_ids(50 + i, 40 + i) for i in range(8)]) == 299
        for i in range(60):  # unrelated prompts, until part of the first one has been replaced
            llm.generate([random_ids(100 + i, 128)], SamplingParams(max_tokens=1))
            left = llm.model.scheduler.stats().replaced_blocks
            if left > 8:
                break
        run()
        first = runs[0]
        for other in runs[1:]:
            for position, row in other.items():
                assert_same(llm, row, first[position])


def test_lif_003_an_aborted_prefill_leaves_only_what_it_computed(make_tiny: Make) -> None:
    ids = random_ids(3, 400)
    expected = solo_rows(make_tiny, ids)
    for steps in (1, 2, 3):
        with make_tiny(**EXACT, max_num_batched_tokens=100, kv_memory="4MiB") as llm:
            llm.model.store.pages[:] = 0xFF  # NaN: reading an unwritten slot would show
            doomed = llm.submit(ids, SamplingParams(max_tokens=4))
            for _ in range(steps):
                llm.step()
            computed = llm.work.tokens_processed
            llm.release(doomed)
            logits = Logits(llm)
            state = llm.submit(ids, SamplingParams(max_tokens=1))
            while state.output is None:
                llm.step()
            assert 0 < state.output.cached_tokens <= computed
            compare_run(llm, logits, state, expected)


@pytest.mark.parametrize("during", ["answer", "prefill"])
def test_srv_003_history_and_partial_answer_after_an_abort(make_tiny: Make, during: str) -> None:
    ids = random_ids(4, 350)
    with make_tiny(**EXACT, max_num_batched_tokens=64, kv_memory="4MiB") as llm:
        doomed = llm.submit(ids, SamplingParams(max_tokens=100))
        if during == "answer":
            while sum(len(d.token_ids) for d in doomed.deltas) < 50:
                llm.step()
            partial = [t for d in doomed.deltas for t in d.token_ids]
            least = (len(ids) + len(partial) - 1) // 16 * 16
        else:
            for _ in range(3):
                llm.step()
            partial, least = [], 3 * 64
        llm.release(doomed)
        follow_up = [*ids, *partial, *random_ids(5, 20)]
        (out,) = llm.generate([follow_up], SamplingParams(max_tokens=8))
    assert out.cached_tokens >= least
    with make_tiny(**EXACT, enable_prefix_caching=False, kv_memory="4MiB") as cold:
        assert (
            cold.generate([follow_up], SamplingParams(max_tokens=8))[0].token_ids == out.token_ids
        )


@pytest.mark.parametrize("fill", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp16"])
def test_nan_001_what_lies_in_unused_slots_never_matters(
    make_tiny: Make, fill: float, kv_format: str
) -> None:
    prompts = [random_ids(10 + n, n) for n in (1, 15, 16, 17, 33)]
    answers = []
    for dirty in (False, True):
        with make_tiny(kv_format=kv_format) as llm:
            if dirty:
                size = {"fp32": np.float32, "fp16": np.float16}.get(kv_format, np.uint16)
                bits = np.float32(fill).view(np.uint32) >> 16 if size is np.uint16 else fill
                with np.errstate(over="ignore"):
                    llm.model.store.pages.view(size)[:] = np.array(bits).astype(size)
            first = llm.generate(prompts, SamplingParams(max_tokens=40, logprobs=1))
            llm.reset_cache()
            forked = SamplingParams(max_tokens=20, temperature=1.0, seed=1, n=3, logprobs=1)
            second = llm.generate(prompts, forked)
            answers.append([[c.logprobs for c in out.choices] for out in (*first, *second)])
    assert answers[0] == answers[1]


def test_pos_001_rows_of_unequal_length_over_two_turns(make_tiny: Make) -> None:
    firsts = [random_ids(20 + n, n) for n in (3, 7, 19)]
    seconds = [random_ids(30 + n, n) for n in (2, 1, 5)]
    with make_tiny(**EXACT) as llm:
        logits = Logits(llm)
        outs = llm.generate(firsts, SamplingParams(max_tokens=12))
        histories = [
            [*out.prompt_token_ids, *out.token_ids, *new]
            for out, new in zip(outs, seconds, strict=True)
        ]
        states = [llm.submit(ids, SamplingParams(max_tokens=12)) for ids in histories]
        while any(state.output is None for state in states):
            llm.step()
        for ids, state in zip(histories, states, strict=True):
            assert state.output is not None
            whole = solo_rows(make_tiny, [*ids, *state.output.token_ids])
            compare_run(llm, logits, state, whole)


def test_beam_001_reported_scores_are_those_of_the_returned_tokens(make_tiny: Make) -> None:
    ids = random_ids(6, 21)
    with make_tiny(**EXACT) as llm:
        for params in (
            SamplingParams(max_tokens=10, beam_width=4),
            SamplingParams(max_tokens=10, temperature=1.0, seed=2, n=4, logprobs=0),
        ):
            (out,) = llm.generate([ids], params)
            for choice in out.choices:
                (scores,) = llm.score([[*ids, *choice.token_ids]])
                total = float(scores[len(ids) - 1 :].sum())
                if choice.score is not None:
                    assert choice.score * len(choice.token_ids) == pytest.approx(total, abs=1e-3)
                else:
                    assert choice.logprobs is not None
                    reported = sum(item.logprob for item in choice.logprobs)
                    assert reported == pytest.approx(total, abs=1e-3)


def test_pfx_009_scores_after_hits_have_every_position(make_tiny: Make) -> None:
    with make_tiny(**EXACT) as llm:
        for length in (15, 16, 17, 31, 32, 33, 48):
            ids = random_ids(40, length)
            llm.generate([ids], SamplingParams(max_tokens=1))
            first, second = llm.score([ids])[0], llm.score([ids])[0]
            assert len(first) == length - 1
            assert np.isfinite(first).all()
            np.testing.assert_array_equal(first, second)


def test_sta_001_one_pool_used_again_and_again(make_tiny: Make) -> None:
    rounds = [
        [random_ids(60 + i, 100) for i in range(4)],
        [random_ids(70 + i, 10) for i in range(2)],
    ]
    with make_tiny(max_model_len=128, kv_memory="256KiB") as llm:
        for prompts in (*rounds, [random_ids(80, 127)]):
            got = [out.token_ids for out in llm.generate(prompts, SamplingParams())]
            with make_tiny(max_model_len=128, kv_memory="256KiB") as fresh:
                assert [out.token_ids for out in fresh.generate(prompts, SamplingParams())] == got
            llm.reset_cache()
        with pytest.raises(KvernError, match="128"):
            llm.generate([random_ids(81, 128)], SamplingParams())
        assert llm.stats().in_use_blocks == 0


def test_con_001_parallel_clients_never_see_each_other(make_tiny: Make) -> None:
    """Sixteen clients, twelve prompts, random arrivals and aborts, a pool that is often full."""
    rng = random.Random(5)
    shared = random_ids(90, 40)
    prompts = [
        [*shared[: 10 * (i % 4)], *random_ids(91 + i, rng.randint(5, 150))] for i in range(12)
    ]
    params = SamplingParams(max_tokens=12)
    with make_tiny(**EXACT) as llm:
        expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]

    async def client(engine: AsyncLLM, seed: int, wrong: list[int]) -> None:
        own = random.Random(seed)
        for _ in range(12):
            index = own.randrange(12)
            task = asyncio.create_task(engine.generate(prompts[index], params))
            if own.random() < 0.2:
                await asyncio.sleep(own.random() * 0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif (await task).token_ids != expected[index]:
                wrong.append(index)

    async def scenario() -> None:
        llm = make_tiny(**EXACT, kv_memory="256KiB", max_model_len=256)
        engine = AsyncLLM(llm)
        wrong: list[int] = []
        await asyncio.gather(*(client(engine, seed, wrong) for seed in range(16)))
        assert wrong == []
        for _ in range(300):
            if not llm.has_work:
                break
            await asyncio.sleep(0.01)
        assert llm.stats().in_use_blocks == 0
        assert llm.check_integrity().is_sound
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore:a sequence is longer")
def test_pos_003_a_rotation_that_depends_on_length(tmp_path: Any) -> None:
    """Dynamic NTK: a position's logits are those of a pass that ends with it, cached or not.

    So a long request leaves nothing behind that turns a short one, in the same batch or after it.
    """
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    model = write_tiny_model(tmp_path, rope_scaling=dynamic, max_position_embeddings=64)

    def rows_of(llm: LLM, *jobs: tuple[list[int], int]) -> list[dict[int, np.ndarray]]:
        """Of each job's chosen tokens: the logits that they were chosen from, by position."""
        logits = LastLogits(llm)
        states = [llm.submit(ids, SamplingParams(max_tokens=count)) for ids, count in jobs]
        while any(state.output is None for state in states):
            llm.step()
        return [logits.of(state.request_id) for state in states]

    def assert_equal(llm: LLM, got: dict[int, np.ndarray], want: dict[int, np.ndarray]) -> None:
        assert sorted(got) == sorted(want)
        for position in got:
            assert_same(llm, got[position], want[position])

    medium, long, short = (random_ids(seed, n) for seed, n in ((7, 50), (8, 100), (9, 20)))
    jobs = [(medium, 51), (long, 1), (short, 8)]
    fresh = []
    for job in jobs:
        with LLM(model, **EXACT, no_cache=True) as llm:
            fresh += rows_of(llm, job)
    with LLM(model, **EXACT) as llm:
        assert llm.model.max_model_len == 256
        (decoded,) = rows_of(llm, jobs[0])  # from 50 to 100 tokens
        assert_equal(llm, decoded, fresh[0])
        assert llm.stats().counters.regime_recomputed_tokens == sum(range(64, 100))
        for job, want in zip(jobs[1:], fresh[1:], strict=True):  # a long one, then a short one
            assert_equal(llm, rows_of(llm, job)[0], want)
    with LLM(model, **EXACT) as llm:
        together = rows_of(llm, (short, 8), (long, 1), (medium, 51))
        for got, want in zip(together, (fresh[2], fresh[1], fresh[0]), strict=True):
            assert_equal(llm, got, want)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16", "int8"])
def test_msk_004_a_passkey_in_an_uneven_batch_is_found(make_tiny: Make, kv_format: str) -> None:
    """One key far ahead of all others: every format attends to it, and to no slot past its own row."""
    with make_tiny() as llm:
        backend = llm.model.backend
    rng = np.random.default_rng(9)
    lengths, heads, dim = (5, 40, 129), 2, 32
    content = Heads(heads, dim, dim)
    layers = (LayerSpec(0, "attention", (KVCacheSpec(content, All()),)),)
    num_blocks = 1 + sum(-(-n // 16) for n in lengths)
    plan = make_kv_plan(
        ModelSpec("toy", "Toy", "toy", 1, layers), kv_format, 16, None, num_blocks, max_num_seqs=3
    )
    store = PagedStore(plan, max(lengths))
    for memory in (store.pages, *store.open_pages, *store.rows.values()):
        memory[...] = 0xFF
    found = store.streams(0)
    assert found is not None
    keys, values = found[1]
    tables = np.zeros((3, -(-129 // 16)), np.int32)
    free = iter(range(1, num_blocks))

    def step(rows: list[int], starts: list[int], ends: list[int]) -> AttendBatch:
        position = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        counts = np.subtract(ends, starts)
        blocks = tables[np.repeat(rows, counts), position // 16].astype(np.int64)
        return AttendBatch(
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            np.array(ends, np.int32),
            tables[rows],
            position.astype(np.int32),
            blocks * 16 + position % 16,
            seats=np.array(rows, np.int32),
        )

    q = rng.normal(size=(3, heads, dim)).astype(np.float32)
    expected, last = [], []
    for row, length in enumerate(lengths):
        tables[row, : -(-length // 16)] = [next(free) for _ in range(-(-length // 16))]
        k = rng.normal(size=(length, heads, dim)).astype(np.float32)
        v = rng.normal(size=(length, heads, dim)).astype(np.float32)
        k[length // 3] = 4 * q[row]
        prompt = step([row], [0], [length - 1])
        backend.append(k[:-1], keys, prompt)
        backend.append(v[:-1], values, prompt)
        expected.append(v[length // 3])
        last.append((k[-1], v[-1]))
    batch = step([0, 1, 2], [length - 1 for length in lengths], list(lengths))
    for stream, x in zip((keys, values), zip(*last, strict=True), strict=True):
        backend.append(np.stack(x), stream, batch)
    out = np.empty((3, heads, dim), np.float32)
    pairs = backend.attend(q, keys, values, batch, AttendParams(1.0), out)
    assert pairs == sum(lengths)
    for got, passkey in zip(out, expected, strict=True):
        cosine = np.sum(got * passkey) / np.linalg.norm(got) / np.linalg.norm(passkey)
        assert cosine >= 0.999
