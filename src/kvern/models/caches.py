"""What a decoder's layers leave in the cache, and whether `kvern.spec` says the same.

The two are written apart, so that planning needs no decoder; before a model runs they are compared.
"""

from __future__ import annotations

from kvern.errors import UnsupportedModelError
from kvern.models.config import DecoderConfig, DeltaNetConfig, LayerConfig, MambaConfig
from kvern.spec.content import Heads, Latent, State
from kvern.spec.layers import LayerSpec, ModelSpec
from kvern.spec.reach import All, Chunk, Last, Reach, Window

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""A state's parts: (name, shape)."""

Need = tuple[Heads | Latent | Shapes, Reach] | None
"""Content and reach of what a layer stores itself; None for nothing."""


def state_shapes(layer: LayerConfig, hidden_size: int) -> Shapes:
    """The parts of a layer's recurrent state."""
    state = layer.state
    if isinstance(state, DeltaNetConfig):
        matrix = state.num_value_heads, state.key_dim, state.value_dim
    elif isinstance(state, MambaConfig):
        matrix = state.num_heads, state.head_dim, state.state_dim
    else:
        assert state is not None
        return (("conv", (hidden_size, state.kernel - 1)),)
    return (("conv", (state.num_channels, state.kernel - 1)), ("recurrent", matrix))


def needed(layer: LayerConfig, hidden_size: int) -> Need:
    """What a decoder layer writes."""
    if layer.state is not None:
        return state_shapes(layer, hidden_size), Last()
    if not layer.has_mixer or layer.share_with is not None:
        return None
    reach: Reach = All()
    if layer.window is not None:
        reach = Window(layer.window)
    if layer.chunk is not None:
        reach = Chunk(layer.chunk)
    if layer.latent is not None:
        return Latent(layer.latent.latent_dim, layer.latent.rope_dim), reach
    return Heads(layer.num_kv_heads, layer.key_dim, layer.value_dim), reach


def described(layer: LayerSpec) -> tuple[Need, int | None]:
    """What a layer stores itself by its description, and whose cache it reads instead."""
    shared = next((c.share_with for c in layer.caches if c.share_with is not None), None)
    own = [cache for cache in layer.caches if cache.share_with is None]
    if not own:
        return None, shared
    content = own[0].content
    if isinstance(content, State):
        parts = tuple((part.name, part.shape) for part in content.parts)
        return (parts, own[0].reach), shared
    assert isinstance(content, Heads | Latent)
    return (content, own[0].reach), shared


def require_same_caches(decoder: DecoderConfig, spec: ModelSpec) -> None:
    """Compare a decoder with the description that its pool is made from.

    Raises:
        UnsupportedModelError: names the first layer that they see differently.
    """
    if len(decoder.layers) != len(spec.layers):
        raise UnsupportedModelError(
            f"{spec.name}: the decoder has {len(decoder.layers)} layers, "
            f"its cache description {len(spec.layers)}"
        )
    for index, (layer, described_layer) in enumerate(zip(decoder.layers, spec.layers, strict=True)):
        need = needed(layer, decoder.hidden_size), layer.share_with
        if need != described(described_layer):
            raise UnsupportedModelError(
                f"{spec.name}: layer {index} needs {need[0]} in the cache, and its description says "
                f"{described(described_layer)[0]}: the configuration is not understood the same way by both"
            )
