"""The public engine on a small model: batching, sharing, limits, counters, streams, aborts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvern import SamplingParams
from kvern.engine.sampler import derived_seed
from kvern.errors import InputError, KvernError, UsageError

Make = Any


def greedy(tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **more)


def test_a_batch_gives_each_prompt_the_answer_it_gets_alone(make_tiny: Make, prompts: Any) -> None:
    with make_tiny() as llm:
        together = llm.generate(prompts, greedy())
    for prompt, out in zip(prompts, together, strict=True):
        with make_tiny() as fresh:
            (alone,) = fresh.generate([prompt], greedy())
        assert out.token_ids == alone.token_ids
        assert out.prompt_token_ids == tuple(prompt)
        assert out.finish_reason == "length"


def test_one_native_call_per_weight_and_step_whatever_the_batch(
    make_tiny: Make, prompts: Any
) -> None:
    """Exactness by running sequences one at a time would not count: the calls are counted."""

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.calls = inner, {"matmul": 0, "attend": 0, "append": 0, "embed": 0}

        def __getattr__(self, name: str) -> Any:
            target = getattr(self.inner, name)
            if name not in self.calls:
                return target

            def counted(*args: Any) -> Any:
                self.calls[name] += 1
                return target(*args)

            return counted

    with make_tiny(max_num_batched_tokens=2048) as llm:
        counting = Counting(llm.model.decoder.backend)
        llm.model.decoder.backend = counting
        for prompt in prompts:
            llm.submit(prompt, greedy(3))
        llm.step()
        layers = len(llm.model.decoder.config.layers)
        # per layer: q/k/v stacked, output, gate/up stacked, down; and the head once
        expected = {"matmul": 4 * layers + 1, "attend": layers, "append": 2 * layers, "embed": 1}
        assert counting.calls == expected
        counting.calls = dict.fromkeys(expected, 0)
        llm.step()
        assert counting.calls == expected


def test_work_is_counted_where_it_is_done_and_equals_the_formula(make_tiny: Make) -> None:
    prompt_tokens, new_tokens = 21, 9
    prompt = list(range(prompt_tokens))
    for no_cache in (False, True):
        with make_tiny(no_cache=no_cache, max_num_batched_tokens=8) as llm:
            llm.generate([prompt], greedy(new_tokens))
            layers = len(llm.model.decoder.config.layers)
            work = llm.work
            lengths = range(prompt_tokens, prompt_tokens + new_tokens)
            if no_cache:
                assert work.tokens_processed == sum(lengths)
                assert work.query_key_products == layers * sum(n * (n + 1) // 2 for n in lengths)
            else:
                total = prompt_tokens + new_tokens - 1
                assert work.tokens_processed == total
                assert work.query_key_products == layers * total * (total + 1) // 2


def test_cached_and_uncached_answers_are_equal(make_tiny: Make, prompts: Any) -> None:
    with make_tiny(no_cache=True) as llm:
        uncached = [out.token_ids for out in llm.generate(prompts, greedy())]
    with make_tiny() as llm:
        cold = llm.generate(prompts, greedy())
        warm = llm.generate(prompts, greedy())
    assert [out.token_ids for out in cold] == uncached
    assert [out.token_ids for out in warm] == uncached
    for out in warm:
        assert 0 <= out.cached_tokens <= len(out.prompt_token_ids) - 1
    assert warm[-1].cached_tokens == len(prompts[-1]) - 1


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
@pytest.mark.parametrize("block_size", [1, 16])
def test_pfx_012_the_same_prompt_again_and_again(
    make_tiny: Make, length: int, block_size: int
) -> None:
    with make_tiny(block_size=block_size) as llm:
        for new_tokens in (1, 16):
            answers = []
            for stream in (False, True, False):
                if stream:
                    deltas = list(llm.stream(list(range(length)), greedy(new_tokens)))
                    out = deltas[-1].output
                    streamed = tuple(t for delta in deltas for t in delta.token_ids)
                    assert out is not None and streamed == out.token_ids
                else:
                    (out,) = llm.generate([list(range(length))], greedy(new_tokens))
                assert out.cached_tokens <= length - 1
                answers.append(out.token_ids)
            assert len(set(answers)) == 1 and len(answers[0]) == new_tokens


def test_pfx_003_a_full_hit_backs_off_one_token_and_the_chain_goes_on(make_tiny: Make) -> None:
    with make_tiny() as llm:
        prompt = list(range(100, 132))
        outs = [llm.generate([prompt], greedy(20))[0] for _ in range(4)]
        assert outs[0].cached_tokens == 0
        assert all(16 <= out.cached_tokens <= 31 for out in outs[1:])
        assert len({out.token_ids for out in outs}) == 1
        cached = llm.stats().cached_blocks
        llm.generate([prompt], greedy(20))
        assert llm.stats().cached_blocks == cached
        (longer,) = llm.generate([prompt + list(outs[0].token_ids)], greedy(4))
        assert longer.cached_tokens >= 48


def test_prefix_caching_can_be_switched_off(make_tiny: Make, prompts: Any) -> None:
    with make_tiny(enable_prefix_caching=False) as llm:
        first = llm.generate(prompts[-2:], greedy())
        second = llm.generate(prompts[-2:], greedy())
        assert [o.cached_tokens for o in second] == [0, 0]
        assert [o.token_ids for o in first] == [o.token_ids for o in second]
        assert llm.stats().cached_blocks == 0


def test_det_003_seeded_sampling_ignores_what_else_runs(make_tiny: Make, prompts: Any) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3)
    with make_tiny() as llm:
        (alone,) = llm.generate([prompts[5]], params)
    with make_tiny(max_num_batched_tokens=64) as llm:
        others = [
            SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(len(prompts))
        ]
        others[5] = params
        crowd = llm.generate(prompts, others)
    assert crowd[5].token_ids == alone.token_ids


def test_frk_001_samples_differ_repeat_and_share_the_prompt(make_tiny: Make) -> None:
    prompt = list(range(33))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, n=4, logprobs=2)
    with make_tiny() as llm:
        (first,) = llm.generate([prompt], params)
        (again,) = llm.generate([prompt], params)
        assert [c.index for c in first.choices] == [0, 1, 2, 3]
        assert len({c.token_ids for c in first.choices}) == 4
        assert [c.token_ids for c in first.choices] == [c.token_ids for c in again.choices]
        assert all(len(c.logprobs or ()) == len(c.token_ids) for c in first.choices)
        assert llm.stats().in_use_blocks == 0
        for choice in first.choices:
            seed = derived_seed(7, choice.index)
            single = SamplingParams(max_tokens=24, temperature=1.0, seed=seed)
            assert llm.generate([prompt], single)[0].token_ids == choice.token_ids


def test_beam_search_finds_what_an_exhaustive_search_finds(make_tiny: Make) -> None:
    prompt, width, steps = [5, 9, 200, 31], 3, 3
    with make_tiny() as llm:
        beams = [((), 0.0)]
        for _ in range(steps):
            grown = []
            for tokens, score in beams:
                params = SamplingParams(max_tokens=1, logprobs=2 * width)
                (out,) = llm.generate([[*prompt, *tokens]], params)
                assert out.logprobs is not None
                grown += [((*tokens, t), score + p) for t, _, p in out.logprobs[0].top]
            beams = sorted(grown, key=lambda beam: -beam[1])[:width]
        (out,) = llm.generate([prompt], SamplingParams(max_tokens=steps, beam_width=width))
        assert out.token_ids == beams[0][0]
        assert out.choices[0].score == pytest.approx(beams[0][1] / steps, rel=1e-4)
        assert llm.stats().in_use_blocks == 0


def test_leaving_a_stream_aborts_the_request_and_gives_its_blocks_back(make_tiny: Make) -> None:
    with make_tiny() as llm:
        for delta in llm.stream(list(range(50)), greedy(100)):
            if delta.token_ids:
                break
        del delta
        stats = llm.stats()
        assert not llm.has_work and stats.in_use_blocks == 0
        total = stats.free_blocks + stats.cached_blocks + stats.in_use_blocks + 1
        assert total == llm.model.kv_plan.num_blocks


def test_pre_001_preempted_requests_answer_as_with_a_big_pool(make_tiny: Make) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 64).tolist() for _ in range(6)]
    params = [
        SamplingParams(max_tokens=200, logprobs=1)
        if i % 2
        else SamplingParams(max_tokens=200, temperature=0.8, seed=i, logprobs=1)
        for i in range(6)
    ]
    with make_tiny(kv_memory="8MiB") as llm:
        roomy = llm.generate(prompts, params)
        page = llm.model.kv_plan.page_bytes
    with make_tiny(kv_memory=41 * page) as llm:
        tight = llm.generate(prompts, params)
        stats, is_exact = llm.stats(), llm.model.backend.row_invariant
        assert stats.counters.preemptions > 0 and stats.in_use_blocks == 0
    if is_exact:
        assert [o.token_ids for o in tight] == [o.token_ids for o in roomy]
        assert [o.logprobs for o in tight] == [o.logprobs for o in roomy]
        return
    # A library's product gives other bits for one row than for many, so that close draws may flip.
    for one, other in zip(tight, roomy, strict=True):
        assert len(one.token_ids) == len(other.token_ids) == 200
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.token_ids[0] == other.token_ids[0]
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-3)


def test_limits_are_refused_with_their_numbers(make_tiny: Make) -> None:
    with make_tiny(max_model_len=64) as llm:
        with pytest.raises(InputError, match="64"):
            llm.generate([list(range(64))], greedy(1))
        with pytest.raises(InputError, match="64"):
            llm.generate([list(range(60))], greedy(5))
        (out,) = llm.generate([list(range(60))], SamplingParams())
        assert len(out.token_ids) == 4 and out.finish_reason == "length"
        with pytest.raises(InputError, match="empty"):
            llm.generate([[]], greedy())
        with pytest.raises(
            InputError, match="token id 300 is outside the model's vocabulary of 300"
        ):
            llm.generate([[1, 300]], greedy())
        assert llm.stats().in_use_blocks == 0 and not llm.has_work
        page = llm.model.kv_plan.page_bytes
    with make_tiny(kv_memory=5 * page) as llm:
        with pytest.raises(InputError, match="64"):
            llm.generate([list(range(100))], greedy(10))
        # 64 slots hold 60 prompt tokens and 4 new ones; the last new token needs no slot.
        (out,) = llm.generate([list(range(60))], SamplingParams())
        assert len(out.token_ids) == 5 and out.finish_reason == "length"
    with pytest.raises(KvernError, match="closed"):
        llm.generate([[1]], greedy())


def test_one_refused_prompt_leaves_nothing_behind(make_tiny: Make) -> None:
    with make_tiny(max_model_len=64) as llm:
        with pytest.raises(InputError):
            llm.generate([[1, 2, 3], list(range(64))], greedy(2))
        assert not llm.has_work


def test_settings_are_refused_by_name(make_tiny: Make) -> None:
    for options, sentence in [
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_format": "int4"}, "not yet stored"),
        ({"kv_format": "int7"}, "int7"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown"),
        ({"weights_format": "int3"}, "weights_format 'int3' is unknown"),
        ({"max_model_len": 5000}, "5,000"),
        ({"replacement": "magic"}, "magic"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            make_tiny(**options)


def test_score_computes_every_position_and_says_why_it_took_no_hit(make_tiny: Make) -> None:
    ids = list(range(40))
    with make_tiny(max_num_batched_tokens=16) as llm:
        llm.generate([ids], greedy(2))
        before = llm.work.tokens_processed
        scores = llm.score([ids, ids[:7]])
        assert [len(s) for s in scores] == [39, 6]
        assert llm.work.tokens_processed - before >= 40
        tolerance = 0 if llm.model.backend.row_invariant else 1e-3
        np.testing.assert_allclose(scores[0][:6], scores[1], atol=tolerance)
        for position in (3, 38):
            (out,) = llm.generate([ids[: position + 1]], SamplingParams(max_tokens=1, logprobs=1))
            assert out.logprobs is not None
            best, _, logprob = out.logprobs[0].top[0]
            (own,) = llm.score([[*ids[: position + 1], best]])
            assert own[position] == pytest.approx(logprob, abs=1e-5)
            np.testing.assert_allclose(own[:position], scores[0][:position], atol=tolerance)


def test_several_threads_share_one_engine(make_tiny: Make, prompts: Any) -> None:
    with make_tiny() as llm:
        expected = [out.token_ids for out in llm.generate(prompts, greedy())]
        got: dict[int, tuple[int, ...]] = {}

        def ask(index: int) -> None:
            got[index] = llm.generate([prompts[index]], greedy())[0].token_ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [got[i] for i in range(len(prompts))] == expected


def test_met_003_a_cache_full_of_reusable_blocks_is_reported_as_such(make_tiny: Make) -> None:
    rng = np.random.default_rng(2)
    with make_tiny() as llm:
        for _ in range(5):
            llm.generate([rng.integers(0, 300, 100).tolist()], greedy(4))
        stats = llm.stats()
        assert stats.cached_blocks >= 5 * 6 and stats.in_use_blocks == 0
        assert llm.kv_info["blocks_used"] == stats.cached_blocks
        llm.reset_cache()
        assert llm.stats().cached_blocks == 0
        assert llm.stats().free_blocks + 1 == llm.model.kv_plan.num_blocks


def test_an_interrupt_between_plan_and_commit_leaves_a_sound_engine(
    make_tiny: Make, prompts: Any
) -> None:
    with make_tiny() as llm:
        expected = [out.token_ids for out in llm.generate(prompts, greedy())]
        runner = llm.model.runner
        execute, calls = runner.execute, iter(range(1000))

        def interrupted(plan: Any) -> Any:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return execute(plan)

        runner.execute = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy(cache_salt="x"))
        assert not llm.has_work and llm.stats().in_use_blocks == 0
        assert llm.check_integrity().is_sound
        assert [out.token_ids for out in llm.generate(prompts, greedy())] == expected


def test_metrics_add_up_and_parse(make_tiny: Make, prompts: Any) -> None:
    with make_tiny() as llm:
        llm.generate(prompts, greedy())
        llm.generate(prompts, greedy())
        values = {}
        for line in llm.metrics().splitlines():
            if not line.startswith("#"):
                name, value = line.split(" ")
                assert name not in values
                values[name.removeprefix("kvern_")] = int(value)
    assert values["queries_total"] == values["hits_total"] + values["misses_total"]
    assert values["queries_total"] == 2 * sum(map(len, prompts))
    assert values["prompt_tokens_total"] == (
        values["computed_prompt_tokens_total"] + values["cached_prompt_tokens_total"]
    )
    held = values["blocks_free"] + values["blocks_cached"] + values["blocks_in_use"]
    assert held + 1 == values["blocks"]
    assert values["generated_tokens_total"] == 2 * 12 * len(prompts)


def test_events_tell_what_is_stored_and_removed(make_tiny: Make) -> None:
    from kvern.core.events import BlocksRemoved, BlocksStored, CacheCleared

    seen: list[Any] = []
    with make_tiny(kv_memory="64KiB", max_model_len=128) as llm:
        end = llm.subscribe(seen.append)
        rng = np.random.default_rng(3)
        for _ in range(6):
            llm.generate([rng.integers(0, 300, 60).tolist()], greedy(3))
        stored = [h for e in seen if isinstance(e, BlocksStored) for h in e.hashes]
        removed = [h for e in seen if isinstance(e, BlocksRemoved) for h in e.hashes]
        assert removed
        assert set(removed) <= set(stored)
        whole = llm.stats().cached_blocks - 6  # each request's partly filled last block has no hash
        assert whole <= len(stored) - len(removed) <= llm.stats().cached_blocks
        llm.reset_cache()
        assert isinstance(seen[-1], CacheCleared)
        end()
        count = len(seen)
        llm.generate([list(range(40))], greedy(2))
        assert len(seen) == count


def test_a_pinned_prefix_survives_what_would_replace_it(make_tiny: Make) -> None:
    kept, rng = list(range(48)), np.random.default_rng(1)
    for pinned in (False, True):
        with make_tiny(kv_memory="64KiB", max_model_len=128) as llm:
            llm.generate([kept], greedy(1))
            if pinned:
                pin = llm.pin(kept, ttl_s=3600)
                assert pin.num_tokens == 47  # what a request could find: never the last token
            for _ in range(8):
                llm.generate([rng.integers(0, 300, 60).tolist()], greedy(3))
            (again,) = llm.generate([kept], greedy(1))
            assert (again.cached_tokens == 47) is pinned
            if pinned:
                assert llm.unpin(pin) and not llm.unpin(pin)
                assert llm.stats().in_use_blocks == 0


@pytest.mark.parametrize("replacement", ["lru", "lfu", "fifo", "slru", "gdsf"])
def test_every_replacement_policy_keeps_answers(
    make_tiny: Make, prompts: Any, replacement: str
) -> None:
    with make_tiny() as llm:
        expected = [out.token_ids for out in llm.generate(prompts, greedy())]
    with make_tiny(kv_memory="96KiB", replacement=replacement, max_model_len=256) as llm:
        for _ in range(3):
            assert [out.token_ids for out in llm.generate(prompts, greedy())] == expected
        assert llm.stats().replaced_blocks > 0
        assert not llm.check_integrity().problems


def spoil_logits(llm: Any, request_id: str) -> None:
    """Make every row of one request NaN from now on."""
    runner = llm.model.runner
    use_row = runner._use_row

    def spoilt(chunk: Any, position: int, row: np.ndarray) -> Any:
        if chunk.seq.request.request_id == request_id:
            row = np.full_like(row, np.nan)
        return use_row(chunk, position, row)

    runner._use_row = spoilt


@pytest.mark.parametrize("kind", ["greedy", "beam", "samples"])
def test_logits_that_are_not_finite_end_their_own_request_only(
    make_tiny: Make, prompts: Any, kind: str
) -> None:
    params = {
        "greedy": greedy(),
        "beam": greedy(beam_width=3),
        "samples": SamplingParams(max_tokens=12, temperature=1.0, n=3),
    }[kind]
    with make_tiny() as llm:
        (expected,) = llm.generate([prompts[6]], greedy())
        llm.reset_cache()
        spoil_logits(llm, "bad")
        bad = llm.submit(prompts[7], params, "bad")
        good = llm.submit(prompts[6], greedy())
        while llm.has_work:
            llm.step()
        assert bad.output.finish_reason == "error"
        assert "not finite" in bad.output.error
        assert good.output.token_ids == expected.token_ids
        assert llm.check_integrity().is_sound
        assert llm.stats().in_use_blocks == 0


def test_a_stream_that_is_never_read_ends_with_its_object(make_tiny: Make) -> None:
    with make_tiny() as llm:
        stream = llm.stream([1, 2, 3], greedy(100))
        assert llm.has_work
        del stream
        assert not llm.has_work
        half_read = llm.stream([1, 2, 3], greedy(100))
        next(half_read)
    half_read.close()
    with pytest.raises(StopIteration):
        next(half_read)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda llm: llm.generate(None),
        lambda llm: llm.generate(5),
        lambda llm: llm.generate({"prompt": "x"}),
        lambda llm: llm.generate([[1], 5]),
        lambda llm: llm.generate([1], {"max_tokens": 1}),
        lambda llm: llm.generate([[1], [2]], [greedy()]),
        lambda llm: llm.stream(7),
        lambda llm: llm.score([[1]]),
        lambda llm: llm.submit([1], request_id=5),
        lambda llm: llm.pin([1, 2], ttl_s=float("nan")),
        lambda llm: llm.pin([1, 2], ttl_s="x"),
        lambda llm: llm.generate([[1, 2.5]]),
    ],
)
def test_misuse_is_one_sentence_and_leaves_nothing_behind(make_tiny: Make, misuse: Any) -> None:
    with make_tiny() as llm:
        with pytest.raises(InputError):
            misuse(llm)
        assert not llm.has_work


def test_score_takes_one_prompt_or_many_up_to_the_whole_context(make_tiny: Make) -> None:
    with make_tiny(max_model_len=64) as llm:
        (one,) = llm.score(list(range(64)))
        (many,) = llm.score([list(range(64))])
        np.testing.assert_array_equal(one, many)
        assert len(one) == 63


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_recorded_programs_change_no_bit(make_tiny: Make, prompts: Any, chunk: int) -> None:
    """Steps repeated from a recording against steps operation by operation, whatever came first."""
    answers = []
    for recorded in (True, False):
        with make_tiny(max_num_batched_tokens=64, max_chunk_tokens=chunk) as llm:
            decoder = llm.model.decoder
            if not recorded:
                decoder._recorder = None
            params = SamplingParams(max_tokens=30, logprobs=3)
            states = [llm.submit(list(range(5)), params)]  # its first steps have one row each
            llm.step()
            llm.step()
            states += [llm.submit(ids, params) for ids in (*prompts, list(range(300)))]
            while llm.has_work:
                llm.step()
            state = llm.model.runner.workspace.recorded
            assert (state.program is not None) is recorded
            assert not state.is_refused
            answers.append([s.output.logprobs for s in states])
    assert answers[0] == answers[1]


def test_scoring_with_logits_that_are_not_finite_raises(make_tiny: Make) -> None:
    with make_tiny() as llm:
        logits = llm.model.decoder.logits

        def spoilt(hidden: np.ndarray, out: np.ndarray) -> None:
            logits(hidden, out)
            out[:] = np.nan

        llm.model.decoder.logits = spoilt
        with pytest.raises(KvernError, match="not finite"):
            llm.score([list(range(20))])
        assert not llm.has_work
