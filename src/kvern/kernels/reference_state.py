"""Reference operations on recurrent states: token after token, each rounded as it is stored.

They are row-invariant: a sequence's numbers are computed by itself, token by token, with the same
shapes whatever the chunk; sums run in numpy's fixed order, and BLAS is never called (einsum of two
operands is numpy's own loop). Because a state is rounded to its stored dtype after every token, it
does not matter where a chunk ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.store.dtypes import decode, encode

F32 = npt.NDArray[np.float32]


def rounded(x: F32, dtype: str) -> F32:
    """float32 values as a stored dtype keeps them."""
    return x if dtype == "fp32" else decode(encode(x, dtype), dtype)


def softmax(x: F32) -> F32:
    """Softmax along the last axis of a C-contiguous ``[T, n]``."""
    exponentials = np.exp(x - np.max(x, axis=-1, keepdims=True))
    result: F32 = exponentials / np.sum(exponentials, axis=-1, keepdims=True)
    return result


def sigmoid(x: F32) -> F32:
    """``1 / (1 + exp(-x))``; exactly 0 where exp overflows."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: F32) -> F32:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: F32) -> F32:
    """``log(1 + exp(x))``, and x itself where that is the same number."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, np.float32(20)))))


def causal_convolution(x: F32, tail: F32, weight: F32, bias: F32 | None) -> tuple[F32, F32]:
    """Depthwise convolution over a sequence's tokens, oldest tap first.

    Args:
        x: ``[t, channels]``.
        tail: the inputs before them, ``[channels, kernel - 1]``; zeros before the first token.
        weight: ``[channels, kernel]``.
        bias: ``[channels]``.

    Returns:
        ``[t, channels]``, and the tail behind the last token.
    """
    num_tokens, kernel = len(x), weight.shape[1]
    inputs = np.concatenate([tail.T, x], axis=0)
    out = np.zeros_like(x)
    for tap in range(kernel):
        out += inputs[tap : tap + num_tokens] * weight[:, tap]
    if bias is not None:
        out += bias
    return out, np.ascontiguousarray(inputs[num_tokens:].T)


def gated_delta_rule(
    q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32, dtype: str
) -> tuple[F32, F32]:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10), token by token.

    Args:
        q: ``[t, heads, key_dim]``, scaled.
        k: ``[t, heads, key_dim]``.
        v: ``[t, heads, value_dim]``.
        decay: factor on the state, ``[t, heads]``.
        beta: strength of the update, ``[t, heads]``.
        state: ``[heads, key_dim, value_dim]``, as stored.
        dtype: in which it is stored.

    Returns:
        ``[t, heads, value_dim]`` and the state behind the last token.
    """
    out, state = np.empty_like(v), state.copy()
    for t in range(len(q)):
        state *= decay[t, :, None, None]
        recalled = np.einsum("hkv,hk->hv", state, k[t])
        update = (v[t] - recalled) * beta[t, :, None]
        state += k[t, :, :, None] * update[:, None, :]
        state = rounded(state, dtype)
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def selective_scan(
    x: F32, step: F32, decay: F32, b: F32, c: F32, state: F32, dtype: str
) -> tuple[F32, F32]:
    """Mamba-2's recurrence (Dao and Gu 2024, arXiv:2405.21060, section 2), token by token.

    Args:
        x: ``[t, heads, head_dim]``.
        step: ``[t, heads]``.
        decay: ``exp(step * A)``, ``[t, heads]``.
        b: ``[t, heads, state_dim]``.
        c: the same shape.
        state: ``[heads, head_dim, state_dim]``, as stored.
        dtype: in which it is stored.

    Returns:
        ``[t, heads, head_dim]`` and the state behind the last token.
    """
    out, state = np.empty_like(x), state.copy()
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        state += (x[t] * step[t, :, None])[:, :, None] * b[t, :, None, :]
        state = rounded(state, dtype)
        out[t] = np.einsum("hdn,hn->hd", state, c[t])
    return out, state
