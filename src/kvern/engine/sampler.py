"""Choosing tokens from one row of logits. Every row is handled alone, so neighbours cannot matter.

Randomness is a function of (seed, sample index, position) and of nothing else: the same request draws the same
numbers in any batch, after any preemption, in any order of execution.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.core.plan import TokenChoice
from kvern.engine.params import SamplingParams
from kvern.errors import IntegrityError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's parameters with its seed settled."""

    params: SamplingParams
    seed: int


def derived_seed(seed: int, sample_index: int) -> int:
    """The seed with which a request of its own draws what this sample of a larger request draws.

    Sample 0 has the request's own seed, so ``n = 1`` and the first of many agree.
    """
    if sample_index == 0:
        return seed % 2**64
    key = struct.pack("<QQ", seed % 2**64, sample_index)
    digest = hashlib.blake2b(key, digest_size=8, person=b"kvern-samples").digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    key = struct.pack("<QQ", derived_seed(seed, sample_index), position)
    digest = hashlib.blake2b(key, digest_size=8, person=b"kvern-sampler").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def require_finite(row: F32, position: int) -> None:
    """Refuse logits without a largest finite one.

    Raises:
        IntegrityError: names the position that they belong to.
    """
    if not np.isfinite(row.max()):  # max propagates NaN
        raise IntegrityError(
            f"the logits at position {position} are not finite: the weights or the cache are damaged"
        )


def log_softmax(row: F32) -> F64:
    """Natural log-probabilities of one row of logits, float64 ``[vocab]``."""
    shifted = row.astype(np.float64) - float(row.max())
    result: F64 = shifted - np.log(np.exp(shifted).sum())
    return result


def top_tokens(scores: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` highest scores, best first, equal scores by lower id."""
    count = min(count, scores.size)
    if count in (0, scores.size):
        candidates = np.arange(scores.size)
    else:
        threshold = np.partition(scores, scores.size - count)[scores.size - count]
        candidates = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[candidates], kind="stable")[:count]
    return candidates[order]


def choose(
    row: F32,
    sampling: Sampling,
    sample_indices: range,
    position: int,
    seen: I32,
    num_prompt_tokens: int,
) -> list[TokenChoice]:
    """Choose one token for each sample index.

    Args:
        row: logits ``[vocab]`` of the model, not changed.
        sampling: parameters and seed.
        sample_indices: which samples draw from this row (several where a prompt forks).
        position: of the token to be chosen.
        seen: all token ids before it.
        num_prompt_tokens: how many of them are the prompt.

    Raises:
        IntegrityError: the logits hold a NaN.
    """
    require_finite(row, position)
    params = sampling.params
    adjusted = _penalised(row, params, seen, num_prompt_tokens) if params.has_penalties else row
    if params.temperature == 0:
        tokens = [int(np.argmax(adjusted))] * len(sample_indices)
    else:
        candidates, cumulative = _distribution(adjusted, params)
        draws = (uniform(sampling.seed, index, position) for index in sample_indices)
        tokens = [_draw(candidates, cumulative, u) for u in draws]
    if params.logprobs is None:
        return [TokenChoice(token, 0.0) for token in tokens]
    logprobs = log_softmax(row)
    top = tuple((int(t), float(logprobs[t])) for t in top_tokens(logprobs, params.logprobs))
    return [TokenChoice(token, float(logprobs[token]), top) for token in tokens]


def likeliest(row: F32, count: int, position: int) -> list[TokenChoice]:
    """The most likely tokens for a position with their log-probabilities, best first: a beam's candidates.

    Raises:
        IntegrityError: the logits hold a NaN.
    """
    require_finite(row, position)
    logprobs = log_softmax(row)
    return [TokenChoice(int(t), float(logprobs[t])) for t in top_tokens(logprobs, count)]


def _penalised(row: F32, params: SamplingParams, seen: I32, num_prompt_tokens: int) -> F32:
    row = row.copy()
    if params.repetition_penalty != 1.0:
        ids = np.unique(seen)
        logits = row[ids]
        factor = np.float32(params.repetition_penalty)
        row[ids] = np.where(logits > 0, logits / factor, logits * factor)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids, counts = np.unique(seen[num_prompt_tokens:], return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return row


def _distribution(row: F32, params: SamplingParams) -> tuple[npt.NDArray[np.int64], F64]:
    """Token ids that may be drawn, and the running sum of their probabilities.

    Temperature first, then top-k, top-p and min-p, each on what the one before left.
    """
    with np.errstate(over="ignore"):  # a tiny temperature leaves only the most likely token
        scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
    weights = np.exp(scaled)
    if params.top_k > 0:
        ids = top_tokens(row, params.top_k)
    elif params.top_p < 1.0:
        # Tokens rarer than (1 - top_p) / vocab weigh less than 1 - top_p together, so none is needed.
        needed = np.flatnonzero(weights >= weights.sum() * (1 - params.top_p) / row.size)
        ids = needed[np.argsort(-row[needed], kind="stable")]
    else:
        ids = np.arange(row.size)
    total = weights.sum() if params.top_k == 0 else weights[ids].sum()
    if params.top_p < 1.0:
        running = np.cumsum(weights[ids])
        ids = ids[: int(np.searchsorted(running, params.top_p * total)) + 1]
    if params.min_p > 0.0:
        ids = ids[weights[ids] >= params.min_p]  # the largest weight is exp(0) = 1
    return ids, np.cumsum(weights[ids])


def _draw(candidates: npt.NDArray[np.int64], cumulative: F64, u: float) -> int:
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(candidates[min(index, candidates.size - 1)])
