"""A correctness figure beside the speeds: the stored format that is measured, against float32 keys and values.

A stored format can be fast and wrong. So before anything is measured, the logits of three fixed prompts are
compared, by the same attention and with weights decoded to float32: rounding of activations, which quantised
weights ask for, would hide most faults. A format that is further off than rounding explains stops everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern import LLM, SamplingParams
from kvern.core.sequence import Sequence as TokenSequence
from kvern.engine.runner import Observer
from kvern.errors import IntegrityError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

NUM_PROMPTS = 3
PROMPT_TOKENS = 96
LARGEST_MEAN_KL = {"fp32": 0.0, "fp16": 1e-4, "bf16": 1e-3}
"""Nats, by stored format; others may have `LARGEST_OTHER_KL`."""

LARGEST_OTHER_KL = 0.01
ROUNDED_KL = 0.05
"""Nats, where the weights are used as they are stored, with rounded activations."""

MOST_DECODED_BYTES = 4 * 2**30
"""A model whose weights might take more than this in float32 is compared with its weights as stored."""

_SEED = 71
_MARGIN_BYTES = 2**20


class _Rows(Observer):
    """Keeps a copy of every row of logits."""

    def __init__(self) -> None:
        self.rows: list[F32] = []

    def on_logits(self, seq: TokenSequence, position: int, row: F32) -> None:
        """Keep it."""
        self.rows.append(row.copy())


def quality_of(llm: LLM) -> dict[str, Any]:
    """Compare the engine's stored format with float32 keys and values.

    Args:
        llm: what is measured; two engines with its settings and small pools of their own are made.

    Returns:
        See `compare`.

    Raises:
        IntegrityError: the format is further off than rounding explains.
    """
    weights = llm.model.weights
    is_decoded = weights.nbytes * (8 if weights.is_quantised else 2) <= MOST_DECODED_BYTES
    settings = replace(
        llm.settings,
        weights_format="fp32" if is_decoded else llm.settings.weights_format,
        kv_memory=_small_pool(llm),
        max_num_seqs=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = LLM(llm.model.path, settings=settings)
        exact = LLM(
            llm.model.path, settings=replace(settings, kv_format="fp32"), share_weights_with=stored
        )
    with stored, exact:
        return compare(stored, exact)


def compare(stored: LLM, exact: LLM) -> dict[str, Any]:
    """Compare two engines on fixed prompts; the caches of both are emptied.

    Returns:
        ``mean_kl`` and ``max_kl`` (nats: of the next token's distribution, the second's against the
        first's), ``same_likeliest`` (share of positions), ``positions``, ``weights_format``.

    Raises:
        IntegrityError: the mean is above what the first's format may have, or not a number.
    """
    prompts = _prompts(stored.model.decoder.config.vocab_size, stored.model.max_model_len)
    pairs = list(zip(_logits(exact, prompts), _logits(stored, prompts), strict=True))
    divergences = np.array([_divergence(p, q) for p, q in pairs])
    mean, settings = float(divergences.mean()), stored.settings
    limit = LARGEST_MEAN_KL.get(settings.kv_format, LARGEST_OTHER_KL)
    if settings.weights_format != "fp32" and settings.kv_format != "fp32":
        limit = ROUNDED_KL
    if not mean <= limit:
        raise IntegrityError(
            f"with {settings.kv_format} keys and values the next token's distribution is {mean:.2g} nats "
            f"from float32's on average over {len(pairs)} positions, and rounding explains {limit:g}: "
            "speeds of wrong answers mean nothing; run kvern check, or choose another --kv-format"
        )
    return {
        "mean_kl": mean,
        "max_kl": float(divergences.max()),
        "same_likeliest": float(np.mean([p.argmax() == q.argmax() for p, q in pairs])),
        "positions": len(pairs),
        "weights_format": settings.weights_format,
    }


def _prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    rng = np.random.default_rng(_SEED)
    length = min(PROMPT_TOKENS, max_model_len - 1)
    return [
        rng.integers(vocab_size // 100, vocab_size, length).tolist() for _ in range(NUM_PROMPTS)
    ]


def _logits(llm: LLM, prompts: Sequence[list[int]]) -> list[F32]:
    """Rows of every position of every prompt, in order."""
    rows = _Rows()
    runner = llm.model.runner
    for prompt in prompts:
        llm.reset_cache()
        before, runner.observer = runner.observer, rows
        try:
            llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        finally:
            runner.observer = before
    llm.reset_cache()
    return rows.rows


def _divergence(p: F32, q: F32) -> float:
    """KL divergence of softmax(q) from softmax(p), in nats."""
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def _log_softmax(row: F32) -> F64:
    x = row.astype(np.float64)
    x -= x.max()
    shifted: F64 = x - np.log(np.exp(x).sum())
    return shifted


def _small_pool(llm: LLM) -> int:
    """Bytes with room for a prompt in any format, whatever its groups and states."""
    plan = llm.model.kv_plan
    pages = sum(
        2 * group.pages_per_entry if group.is_state else -(-PROMPT_TOKENS // group.block_size) + 1
        for group in plan.groups
    )
    return 4 * (pages + 2) * plan.page_bytes + _MARGIN_BYTES
