"""The real default model with float32 weights and cache: tokens and logits are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern import LLM, SamplingParams
from kvern.engine.runner import Observer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_NEW = 64
TOLERANCE = 2e-4
PROMPT_LENGTHS = (1, 37, 700)


class LogitsRecorder(Observer):
    """Keeps the logits after every computed position of one request."""

    def __init__(self) -> None:
        self.rows: dict[int, np.ndarray] = {}

    def on_logits(self, seq: Any, position: int, row: np.ndarray) -> None:
        self.rows[position] = row.copy()


@pytest.fixture(scope="module")
def peer(smollm2_path: Path) -> Any:
    """The same GGUF file, decoded to float32 and run by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(
    scope="module", params=["native", pytest.param("reference", marks=pytest.mark.full)]
)
def llm(request: Any, smollm2_path: Path) -> Iterator[LLM]:
    if request.param == "native":
        request.getfixturevalue("require_native")
    with LLM(
        smollm2_path,
        backend=request.param,
        weights_format="fp32",
        kv_format="fp32",
        kv_memory="128MiB",
    ) as engine:
        yield engine


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_tokens_and_every_logit(llm: LLM, peer: Any, length: int) -> None:
    text = "A key-value cache keeps what attention has already computed. " * 80
    prompt = llm.tokenizer.encode(text)[:length]
    assert len(prompt) == length
    recorder = LogitsRecorder()
    llm.model.runner.observer = recorder
    try:
        params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, cache_salt=str(length))
        (out,) = llm.generate([prompt], params)
    finally:
        llm.model.runner.observer = None
    ids = [*prompt, *out.token_ids]
    with torch.no_grad():
        theirs = peer(torch.tensor([ids[:-1]])).logits[0].numpy()
    assert list(out.token_ids) == theirs[length - 1 :].argmax(-1).tolist()
    ours = np.stack([recorder.rows[position] for position in range(len(ids) - 1)])
    spread = theirs.max(-1, keepdims=True) - theirs.min(-1, keepdims=True)
    assert np.max(np.abs(ours - theirs) / spread) < TOLERANCE


def test_scores_are_the_log_probabilities_of_the_given_tokens(llm: LLM, peer: Any) -> None:
    ids = llm.tokenizer.encode("The capital of Norway is Oslo, and that of France is Paris.")
    (scores,) = llm.score([ids])
    with torch.no_grad():
        logits = peer(torch.tensor([ids])).logits[0]
    theirs = torch.log_softmax(logits.double(), -1)[range(len(ids) - 1), ids[1:]].numpy()
    assert scores.shape == (len(ids) - 1,)
    np.testing.assert_allclose(scores, theirs, atol=5e-3)
