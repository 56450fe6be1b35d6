"""What a decoder needs to know: a declarative description, filled in by each family.

The shared decoder (`kvern.models.decoder`) reads nothing else. What a layer leaves in the cache is described
separately, in `kvern.spec`, so that planning needs no decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
"""A configuration in Hugging Face's ``config.json`` form."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of frequencies.
        rotary_dim: how many of a head's dims turn.
        scaling: the ``rope_scaling`` entry of the configuration, or empty.
        original_max_positions: the length the model was first trained on, where a scaling kind needs it.
    """

    theta: float
    rotary_dim: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    original_max_positions: int | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer's attention and feed-forward geometry.

    Attributes:
        scale: factor on q·k, usually ``key_dim ** -0.5``.
        window: sliding window, None for all past tokens.
        rope: rotary embedding, None for a layer without positions.
        softcap: cap on attention logits, None for none.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    intermediate_size: int
    activation: str
    rope: RopeConfig | None
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A whole decoder.

    Attributes:
        embedding_scale: factor on the embedded tokens.
        attention_bias: q, k, v (and output, where the file has it) carry a bias vector.
        tie_embeddings: the output head is the embedding matrix.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    tie_embeddings: bool
    embedding_scale: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a file keeps each weight; ``{i}`` is the layer."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    q: str
    k: str
    v: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    rope_factors: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: everything that distinguishes it, as data.

    Attributes:
        name: for messages.
        architectures: ``architectures`` entries of config.json that belong to it.
        gguf_architectures: ``general.architecture`` values that belong to it.
        describe: configuration to `DecoderConfig`; refuses what the decoder does not do, by name.
        hf_names: tensor names in a Hugging Face folder.
        gguf_names: tensor names in a GGUF file.
        gguf_rope_interleaved: GGUF files of this family store q and k rows so that rotary pairs are
            neighbours.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    describe: Callable[[Config], DecoderConfig]
    hf_names: TensorNames
    gguf_names: TensorNames
    gguf_rope_interleaved: bool = False
