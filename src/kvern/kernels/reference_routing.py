"""From a router's logits to experts and weights: the definition, row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import Routing
from kvern.kernels.reference_state import sigmoid, softmax

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def largest(scores: F32, count: int) -> I64:
    """Indices of the ``count`` largest per row, largest first; a tie goes to the lower index."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.ascontiguousarray(order[:, :count])


def route(logits: F32, routing: Routing) -> tuple[I64, F32]:
    """Chosen experts, the best first, and their weights, ``[T, num_chosen]``; logits ``[T, num_experts]``."""
    scores, ranking = _ranking(logits, routing)
    chosen = largest(ranking, routing.num_chosen)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.scoring == "softmax_chosen":
        weights = softmax(weights)
    elif routing.scoring == "sigmoid_chosen":
        weights = sigmoid(weights)
    if routing.is_normalized:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + np.float32(1e-20))
    if routing.scale != 1.0:
        weights = weights * np.float32(routing.scale)
    if routing.expert_scale is not None:
        weights = weights * routing.expert_scale[chosen]
    return chosen, weights


def margin(logits: F32, routing: Routing) -> F32:
    """How clear each row's choice is: the last chosen rank score less the best one left out, ``[T]``."""
    ranked = -np.sort(-_ranking(logits, routing)[1], axis=-1)
    count = routing.num_chosen
    if count == routing.num_experts:
        return np.full(len(logits), np.inf, np.float32)
    clear: F32 = ranked[:, count - 1] - ranked[:, count]
    return clear


def _ranking(logits: F32, routing: Routing) -> tuple[F32, F32]:
    """Scores, and what the choice goes by."""
    if routing.scoring == "softmax":
        scores = softmax(logits)
    else:
        scores = sigmoid(logits) if routing.scoring == "sigmoid" else logits
    ranking = scores if routing.score_bias is None else scores + routing.score_bias
    if routing.num_groups > 1:
        ranking = _within_groups(ranking, routing)
    return scores, ranking


def _within_groups(ranking: F32, routing: Routing) -> F32:
    """The ranking with all but the best groups of experts out of the choice."""
    num_tokens = len(ranking)
    grouped = ranking.reshape(num_tokens, routing.num_groups, -1)
    if routing.group_score == "max":
        group_scores = np.max(grouped, axis=-1)
    else:
        best = np.sort(grouped, axis=-1)[:, :, -2:]
        group_scores = best[:, :, 1] + best[:, :, 0]
    kept = largest(group_scores, routing.num_chosen_groups)
    is_kept = np.zeros(group_scores.shape, bool)
    np.put_along_axis(is_kept, kept, True, axis=-1)
    masked = np.where(is_kept[:, :, None], grouped, np.float32(-np.inf))
    return masked.reshape(num_tokens, -1)
