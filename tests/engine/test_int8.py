"""int8 keys and values through the whole engine: every kind of layer, every way to come to an answer.

Equal means ``==`` on the native backend. Answers are compared with those of the same engine, format and
block size with an empty cache and everything recomputed at every step.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import write_tiny_model
from tests.models.cases import CASES
from tests.models.harness import save_model

from kvern import LLM, SamplingParams
from kvern.cli.main import main
from kvern.errors import CapacityError, UsageError
from kvern.spec.codec import KV_FORMATS, stored_formats

Make = Callable[..., LLM]
Folders = Callable[[str], Path]
FAMILIES = (
    "gemma3",  # windows beside full layers
    "gpt-oss",  # windows, learnt sink logits
    "llama4",  # chunks
    "gemma3n",  # layers that read another layer's cache
    "gemma4",  # the same, with keys of another width in full layers
    "deepseek-v3",  # one latent stream
    "qwen3-next",  # states beside keys and values
    "granite-4-h",
)
GREEDY = SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True)


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 140, length).tolist()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A small model of a family, made once."""
    pytest.importorskip("transformers")
    root, made = tmp_path_factory.mktemp("int8"), dict[str, Path]()

    def get(family: str) -> Path:
        if family not in made:
            case = next(case for case in CASES if case.family == family)
            save_model(root / family, case, {**case.fields, "max_position_embeddings": 512})
            made[family] = root / family
        return made[family]

    return get


def make(folder: Path, **options: Any) -> LLM:
    defaults = {"kv_format": "int8", "kv_memory": "8MiB", "block_size": 16, "threads": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LLM(folder, **{**defaults, **options})


def assert_same(llm: LLM, got: Any, want: Any) -> None:
    if llm.model.backend.row_invariant:
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("block_size", [16, pytest.param(1, marks=pytest.mark.full), 32, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_that_without_the_cache(
    folder_of: Folders, family: str, block_size: int
) -> None:
    folder = folder_of(family)
    prompts = [random_ids(1, 90), random_ids(2, 33), random_ids(1, 90)[:70] + random_ids(3, 9)]
    with make(folder, no_cache=True, block_size=block_size) as llm:
        expected = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    settings: list[dict[str, Any]] = [
        {},
        {"max_chunk_tokens": 7},
        {"max_num_batched_tokens": 40, "threads": 3},
        {"max_num_seqs": 2, "kv_format": "int8;0=int8"},
    ]
    for options in settings:
        with make(folder, block_size=block_size, **options) as llm:
            for out, want in zip(llm.generate(prompts, GREEDY), expected, strict=True):
                assert_same(llm, out, want)
            for prompt, want in zip(prompts, expected, strict=True):  # now from hits
                (out,) = llm.generate([prompt], GREEDY)
                assert_same(llm, out, want)
                is_state = any(group.is_state for group in llm.model.kv_plan.groups)
                if block_size <= 32 and not is_state and family == "deepseek-v3":
                    assert out.cached_tokens == (len(prompt) - 1) // block_size * block_size
            assert llm.check_integrity().is_sound


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "deepseek-v3", "qwen3-next"])
def test_preempted_and_forked_answers_are_those_too(folder_of: Folders, family: str) -> None:
    folder, prompts = folder_of(family), [random_ids(10 + n, 20 + 3 * n) for n in range(4)]
    with make(folder, no_cache=True) as llm:
        expected = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        plan = llm.model.kv_plan
        sampled = SamplingParams(max_tokens=20, n=3, temperature=1.0, seed=5, ignore_eos=True)
        (forks,) = llm.generate([prompts[3]], sampled)
    least = plan.pages_for(len(prompts[3]) + 20, 64)
    seats = 4
    memory = (least + least // 2 + 2) * plan.page_bytes + seats * sum(
        group.open_page_bytes for group in plan.groups
    )
    with make(folder, kv_memory=memory, max_num_seqs=seats, max_num_batched_tokens=64) as llm:
        outs = llm.generate(prompts, GREEDY)
        for out, want in zip(outs, expected, strict=True):
            assert_same(llm, out, want)
        assert llm.stats().counters.preemptions > 0
    with make(folder) as llm:
        (out,) = llm.generate([prompts[3]], sampled)
        assert [c.token_ids for c in out.choices] == [c.token_ids for c in forks.choices]
        beams = SamplingParams(max_tokens=12, beam_width=3, ignore_eos=True)
        (out,) = llm.generate([prompts[3]], beams)
        for choice in out.choices:
            (scores,) = llm.score([[*prompts[3], *choice.token_ids]])
            total = float(scores[len(prompts[3]) - 1 :].sum())
            assert choice.score is not None
            assert choice.score * len(choice.token_ids) == pytest.approx(total, abs=1e-3)


@pytest.mark.usefixtures("require_native")
def test_threads_change_no_bit(tiny_model: Path, prompts: list[list[int]]) -> None:
    found = []
    for threads in (1, 2, 3, 8):
        with make(tiny_model, threads=threads) as llm:
            outs = llm.generate(prompts, GREEDY)
            found.append([(out.token_ids, out.logprobs) for out in outs])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("family", ["gemma3n", "deepseek-v3", "qwen3-next"])
def test_the_reference_backend_agrees(folder_of: Folders, family: str) -> None:
    ids = random_ids(4, 60)
    with make(folder_of(family), backend="reference") as llm:
        (whole,) = llm.score([ids])
    with make(folder_of(family), backend="reference", max_chunk_tokens=7) as llm:
        (chunked,) = llm.score([ids])
    np.testing.assert_allclose(chunked, whole, atol=0.05)
    with make(folder_of(family)) as llm:
        np.testing.assert_allclose(llm.score([ids])[0], whole, atol=0.1)


@pytest.mark.parametrize("kv_format", ["int8", "int8;0=bf16", "bf16;1=int8"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_bytes_are_those_that_were_planned(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], kv_format: str, block_size: int
) -> None:
    options = {"kv_format": kv_format, "kv_memory": "1234567", "block_size": block_size}
    limits = {"max_num_seqs": 7, "max_num_batched_tokens": 96}
    with make(tiny_model, backend="reference", **options, **limits) as llm:
        store, plan, info = llm.model.store, llm.model.kv_plan, llm.kv_info
        narrow = {"int8": 2, "int8;0=bf16": 1, "bf16;1=int8": 1}[kv_format]
        per_token = 2 * 16 * 2 * 2  # heads, dim, keys and values, bytes
        assert store.open_bytes == plan.open_bytes == 7 * narrow * block_size * per_token
        assert store.row_bytes == plan.row_bytes(96) == 96 * per_token
        assert (info["open_bytes"], info["row_bytes"]) == (store.open_bytes, store.row_bytes)
        assert store.nbytes + store.open_bytes + plan.waste == 1234567
        assert plan.waste < plan.page_bytes
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += ["--max-num-seqs=7", "--max-batched-tokens=96", "--context=100", "--json"]
    assert main(["plan", str(tiny_model), "--engine", "kvern", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_blocks"] == plan.num_blocks
    assert document["pool_bytes"] == store.nbytes
    assert document["open_bytes"] == store.open_bytes
    assert document["row_bytes"] == store.row_bytes


def test_cap_003_exactly_enough_memory_is_enough(tiny_model: Path) -> None:
    """Scales and open blocks are part of the need: one byte less is refused before anything is allocated."""
    with make(tiny_model, max_num_seqs=2) as llm:
        plan = llm.model.kv_plan
    need = 2 * plan.page_bytes + plan.open_bytes
    with make(tiny_model, kv_memory=need, max_num_seqs=2) as llm:
        (out,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(out.token_ids) == 4
    with pytest.raises(CapacityError, match=f"give at least {need:,} bytes"):
        make(tiny_model, kv_memory=need - 1, max_num_seqs=2)


@pytest.mark.parametrize("kv_format", sorted(set(KV_FORMATS) - set(stored_formats())))
def test_qnt_005_what_is_not_stored_is_refused_at_the_start(
    tiny_model: Path, kv_format: str
) -> None:
    for mix in (kv_format, f"bf16;1={kv_format}"):
        with pytest.raises(UsageError, match="not yet stored by the engine: choose fp32"):
            make(tiny_model, kv_format=mix, block_size=32)


@pytest.mark.parametrize("family", FAMILIES)
def test_qnt_005_and_nan_001_every_kind_serves_from_a_pool_of_nan(
    folder_of: Folders, family: str
) -> None:
    lengths = (1, 15, 16, 17, 33)
    with make(folder_of(family)) as clean, make(folder_of(family)) as dirty:
        store = dirty.model.store
        is_state = any(group.is_state for group in dirty.model.kv_plan.groups)
        for memory in (
            *([] if is_state else [store.pages]),
            *store.open_pages,
            *store.rows.values(),
        ):
            memory[...] = 0xFF
        prompts = [random_ids(50 + n, n) for n in lengths]
        for _ in range(2):
            for out, want in zip(
                dirty.generate(prompts, GREEDY), clean.generate(prompts, GREEDY), strict=True
            ):
                assert len(out.token_ids) == 20
                assert_same(dirty, out, want)


def test_qnt_001_outlying_channels_cost_little(tmp_path: Path) -> None:
    """Two channels of every key far from the others, as biased projections have them."""
    model = write_tiny_model(tmp_path / "plain")
    ids = random_ids(5, 120)

    def scores(kv_format: str) -> np.ndarray:
        with make(model, kv_format=kv_format, backend="reference") as llm:
            append = llm.model.decoder.backend.append

            def biased(x: Any, stream: Any, batch: Any) -> None:
                x = x.copy()
                x[:, :, [2, 9]] += 50
                append(x, stream, batch)

            class Biased:
                def __getattr__(self, name: str) -> Any:
                    return biased if name == "append" else getattr(backend, name)

            backend = llm.model.decoder.backend
            llm.model.runner.decoder.backend = Biased()  # type: ignore[assignment]
            return llm.score([ids])[0]

    exact = scores("bf16")
    assert np.isfinite(exact).all()
    assert np.abs(scores("int8") - exact).mean() < 0.25


@pytest.mark.usefixtures("require_native")
def test_the_quality_of_the_default_model_stays(smollm2_path: Path) -> None:
    """Perplexity of 2,048 tokens of Python's own documentation: at most 1 % off bf16."""
    topics = [("assignment", "exceptions", "try"), ("class", "function", "import", "with")]
    texts = ["\n".join(pydoc_data.topics.topics[name] for name in names) for names in topics]
    with LLM(smollm2_path, kv_memory="64MiB") as wide:
        ids = [wide.token_ids(text)[:1024] for text in texts]
        assert [len(each) for each in ids] == [1024, 1024]
        exact = -np.concatenate(wide.score(ids)).mean()
        with LLM(smollm2_path, kv_format="int8", share_weights_with=wide, kv_memory="64MiB") as llm:
            narrow = -np.concatenate(llm.score(ids)).mean()
    assert abs(np.exp(narrow - exact) - 1) < 0.01, (np.exp(exact), np.exp(narrow))
