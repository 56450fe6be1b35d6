"""Facts of a model that engines disagree on, read from what its configuration states."""

from __future__ import annotations

from kvern.spec.content import Heads, Latent, State
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.reach import All

EXTRA_CONV_ELEMENTS = {"qwen4_exp": 4 * 2560 * 9}
"""Convolution inputs that a family keeps once per sequence beside its layers' states, and that its
configuration does not give away: the n-gram path's 4 streams of 2560 channels, 9 columns."""

UNSTATED_DRAFT_FAMILIES = ("bailing_hybrid", "glm5_next", "qwen4_exp")
"""Families whose checkpoints hold one draft layer though their configuration may name none."""


def draft_layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """The model's own layers for multi-token prediction.

    An unstated one is like the last layer that keeps every token.
    """
    if model.mtp_layers or model.family not in UNSTATED_DRAFT_FAMILIES:
        return model.mtp_layers
    keeping = [x for x in model.layers if any(isinstance(c.reach, All) for c in x.caches)]
    return tuple(keeping[-1:])


def named_state_dtype(model: ModelSpec) -> str | None:
    """The dtype that the configuration names for recurrent states, or None."""
    for field in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        value = model.details.get(field)
        if isinstance(value, str):
            return value
    return None


def named_parameters(model: ModelSpec) -> int | None:
    """The parameter count that the configuration itself notes, or None."""
    value = model.details.get("noted_parameters")
    return value if isinstance(value, int) else None


def query_key_dim(model: ModelSpec, latent: Latent) -> int | None:
    """Elements of one attention head's key when an MLA latent is expanded, or None."""
    value = model.details.get("qk_nope_head_dim")
    return value + latent.rope_dim if isinstance(value, int) else None


def value_head_dim(model: ModelSpec) -> int | None:
    """Elements of one attention head's value when an MLA latent is expanded, or None."""
    value = model.details.get("v_head_dim")
    return value if isinstance(value, int) else None


def is_working_input(layer: LayerSpec, cache: KVCacheSpec) -> bool:
    """Whether a cache only holds what a compressor of the same layer still works on.

    Such inputs lie beside latents or pooled index keys; engines keep them by rules of their own.
    """
    if not cache.follows_format:
        return True
    beside_latent = any(isinstance(other.content, Latent) for other in layer.caches)
    return beside_latent and isinstance(cache.content, Heads)


def most_full_heads(model: ModelSpec) -> int | None:
    """KV heads of the layer with the most among those that keep every token; None without."""
    heads = [
        cache.content.num_kv_heads
        for layer in model.layers
        for cache in layer.caches
        if isinstance(cache.content, Heads)
        and isinstance(cache.reach, All)
        and not is_working_input(layer, cache)
    ]
    return max(heads, default=None)


def conv_groups(state: State) -> tuple[int, int] | None:
    """Groups of a recurrence's input and output projections, and elements of each; None without.

    The convolution of a matrix-valued recurrence runs over heads × dim channels of its input and,
    per group, two vectors of the state's width (Mamba-2: B and C; gated delta nets: q and k).
    """
    shapes = {part.name: part.shape for part in state.parts}
    conv, recurrent = shapes.get("conv"), shapes.get("recurrent")
    if conv is None or recurrent is None or len(recurrent) != 3:
        return None
    num_heads, head_dim, width = recurrent
    rest = conv[0] - num_heads * head_dim
    return (rest // (2 * width), width) if rest > 0 and rest % (2 * width) == 0 else None


def is_delta_attention(state: State) -> bool:
    """Whether q, k and v have equally many heads and a square state each (KDA)."""
    shapes = {part.name: part.shape for part in state.parts}
    conv, recurrent = shapes.get("conv"), shapes.get("recurrent")
    if conv is None or recurrent is None or len(recurrent) != 3:
        return False
    num_heads, key_dim, value_dim = recurrent
    return key_dim == value_dim and conv[0] == 3 * num_heads * key_dim
