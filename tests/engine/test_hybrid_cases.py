"""Field cases on windows, latents and recurrent states, through the whole engine.

Small random models saved by transformers; float32; native backend where it is built, so that "equal" is
``==`` there and means equal greedy tokens elsewhere.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import write_tiny_model
from tests.models.cases import CASES
from tests.models.harness import save_model

from kvern import LLM, SamplingParams
from kvern.engine.runner import Observer

WINDOW = 32


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 140, length).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small model of each kind."""
    root = tmp_path_factory.mktemp("kinds")
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    found = {"window": write_tiny_model(root / "window", **window, sliding_window=WINDOW)}
    for kind, family in (("latent", "deepseek-v2"), ("state", "lfm2"), ("delta", "qwen3-next")):
        case = next(case for case in CASES if case.family == family)
        save_model(root / kind, case, {**case.fields, "max_position_embeddings": 512})
        found[kind] = root / kind
    return found


def make(folder: Path, **options: Any) -> LLM:
    defaults = {
        "kv_format": "fp32",
        "weights_format": "fp32",
        "kv_memory": "8MiB",
        "block_size": 16,
        "max_model_len": None,
        "threads": 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LLM(folder, **{**defaults, **options})


def same(llm: LLM, got: Any, expected: Any) -> bool:
    """Tokens always; reported log-probabilities too where bits are promised."""
    if got.token_ids != expected.token_ids:
        return False
    return not llm.model.backend.row_invariant or got.logprobs == expected.logprobs


KINDS = ("window", "latent", "state", "delta")
GREEDY = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)


class LiveBlocks(Observer):
    """The most blocks that a sequence's table of one group has held at once."""

    def __init__(self, group: int) -> None:
        self.group, self.most = group, 0

    def on_chunks(self, chunks: Any) -> None:
        for chunk in chunks:
            held = int(np.count_nonzero(chunk.seq.tables[self.group].blocks))
            self.most = max(self.most, held)


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_window_layer_holds_window_plus_chunk_plus_one_block(
    folders: dict[str, Path], chunk: int, block_size: int
) -> None:
    with make(folders["window"], block_size=block_size, max_num_batched_tokens=chunk) as llm:
        watch = LiveBlocks(0)
        llm.model.runner.observer = watch
        (out,) = llm.generate([random_ids(0, 200)], SamplingParams(max_tokens=60, ignore_eos=True))
        assert len(out.token_ids) == 60
        assert watch.most * block_size <= WINDOW + chunk + block_size
        kept = llm.stats().cached_blocks * llm.model.kv_plan.page_bytes
        assert llm.stats().in_use_blocks == 0
        assert kept <= llm.model.store.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_mla_001_and_msk_001_any_chunking_behind_any_hit(
    folders: dict[str, Path], kind: str
) -> None:
    ids = random_ids(1, 200)
    with make(folders[kind], no_cache=True, max_num_batched_tokens=512) as llm:
        (expected,) = llm.generate([ids], GREEDY)
    for chunk in (1, 7, 16, 64, 128):
        for cached in (0, 16, 150):
            with make(folders[kind], max_num_batched_tokens=chunk) as llm:
                if cached:
                    llm.generate([ids[:cached]], SamplingParams(max_tokens=1))
                (out,) = llm.generate([ids], GREEDY)
                assert same(llm, out, expected), (chunk, cached)


@pytest.mark.parametrize("kind", KINDS)
def test_lif_007_sequences_that_join_and_leave(folders: dict[str, Path], kind: str) -> None:
    prompts = [random_ids(10 + n, n) for n in (10, 64, 200, 70)]
    with make(folders[kind], no_cache=True) as llm:
        expected = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    with make(folders[kind]) as llm:
        first = [llm.submit(prompt, GREEDY) for prompt in prompts[:3]]
        for _ in range(4):
            llm.step()
        llm.release(first[1])
        states = [first[0], first[2], llm.submit(prompts[3], GREEDY)]
        while any(state.output is None for state in states):
            llm.step()
        for state, index in zip(states, (0, 2, 3), strict=True):
            assert same(llm, state.output, expected[index])


@pytest.mark.parametrize("kind", ["window", "state", "delta"])
def test_hyb_001_extensions_and_repeats_hit_branches_hit_a_checkpoint(
    folders: dict[str, Path], kind: str
) -> None:
    a = random_ids(2, 280)
    prompts = [a, a + random_ids(3, 30), a[:200] + random_ids(4, 50), a]
    with make(folders[kind], no_cache=True) as llm:
        expected = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    with make(folders[kind], state_checkpoint_tokens=64) as llm:
        outs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        for out, plain in zip(outs, expected, strict=True):
            assert same(llm, out, plain)
        assert outs[0].cached_tokens == 0
        assert outs[1].cached_tokens >= 256
        assert outs[3].cached_tokens >= 256
        if kind != "window":
            assert 0 < outs[2].cached_tokens <= 200
        else:
            assert outs[2].miss is not None  # the window before the branch may be gone: it says so


@pytest.mark.parametrize("total", [63, 64, 65, 80, 128, 129])
def test_hyb_003_repeats_around_checkpoint_borders(folders: dict[str, Path], total: int) -> None:
    with make(folders["delta"], no_cache=True) as plain:
        for prompt_length in (40, 56):
            ids = random_ids(5, prompt_length)
            params = SamplingParams(max_tokens=total - prompt_length, logprobs=1, ignore_eos=True)
            (expected,) = plain.generate([ids], params)
            with make(folders["delta"], state_checkpoint_tokens=64) as llm:
                for _ in range(4):
                    assert same(llm, llm.generate([ids], params)[0], expected)


@pytest.mark.parametrize("kind", ["window", "state", "delta"])
def test_ckp_001_a_chat_computes_only_what_is_new(folders: dict[str, Path], kind: str) -> None:
    with (
        make(folders[kind], state_checkpoint_tokens=64) as llm,
        make(folders[kind], no_cache=True) as plain,
    ):
        history: list[int] = []
        for turn in range(4):
            new = random_ids(20 + turn, 12 if turn == 0 else 60)
            prompt = history + new
            before = llm.work.tokens_processed
            (out,) = llm.generate([prompt], GREEDY)
            assert same(llm, out, plain.generate([prompt], GREEDY)[0])
            computed = llm.work.tokens_processed - before - len(out.token_ids) + 1
            assert computed <= len(new) + len(out.token_ids) + 64
            history = [*prompt, *out.token_ids]
        edited = history[:-40] + random_ids(30, 20)
        (out,) = llm.generate([edited], GREEDY)
        assert same(llm, out, plain.generate([edited], GREEDY)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_beam_001_scores_on_every_kind_of_cache(folders: dict[str, Path], kind: str) -> None:
    ids = random_ids(6, 45)
    with make(folders[kind]) as llm:
        params = SamplingParams(max_tokens=6, beam_width=3, ignore_eos=True)
        (out,) = llm.generate([ids], params)
        assert len(out.choices) >= 1
        for choice in out.choices:
            (scores,) = llm.score([[*ids, *choice.token_ids]])
            total = float(scores[len(ids) - 1 :].sum())
            assert choice.score is not None
            assert choice.score * len(choice.token_ids) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("kind", ["state", "delta"])
def test_lif_004_many_requests_in_a_pool_of_few_states(folders: dict[str, Path], kind: str) -> None:
    with make(folders[kind]) as llm:
        group_pages = [group.pages_for(64) for group in llm.model.kv_plan.groups]
        page = llm.model.kv_plan.page_bytes
    prompts = [random_ids(40 + i, 20 + i % 13) for i in range(24)]
    with make(folders[kind], no_cache=True, max_num_seqs=8) as llm:
        expected = llm.generate(prompts, GREEDY)
    with make(folders[kind], kv_memory=(3 * sum(group_pages) + 2) * page, max_num_seqs=16) as llm:
        outs = llm.generate(prompts, GREEDY)
        assert all(same(llm, out, plain) for out, plain in zip(outs, expected, strict=True))
        assert llm.stats().in_use_blocks == 0
        assert llm.check_integrity().is_sound
