"""What a decoder needs to know: a declarative description, filled in by each family.

The shared decoder (`kvern.models.decoder`) reads nothing else. What a layer leaves in the cache is
described separately, in `kvern.spec`, so that planning needs no decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvern.models.names import TensorNames
from kvern.spec.configs.absent import with_absent_fields
from kvern.spec.regimes import PositionRegimes

Config = Mapping[str, Any]
"""A configuration in Hugging Face's ``config.json`` form."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of frequencies.
        rotary_dim: how many of a head's dims turn.
        scaling: the ``rope_scaling`` entry of the configuration, or empty.
        original_max_positions: the length the model was first trained on, where a scaling kind
            needs it.
        interleaved: pairs are neighbours, (0, 1), (2, 3), ..., instead of (i, i + rotary_dim / 2).
    """

    theta: float
    rotary_dim: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    original_max_positions: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), always absorbed.

    The layer's ``key_dim`` is ``latent_dim + rope_dim``, its ``value_dim`` the width of a value
    head.

    Attributes:
        latent_dim: compressed keys and values of a token.
        rope_dim: the rotary key that all heads share.
        nope_dim: width of a query head without its rotary part.
        query_rank: rank of the compressed query; None for a direct projection.
        norm_eps: of the norms inside the layer.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464), with a convolution over q, k, v."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def num_channels(self) -> int:
        """Columns of the convolution: q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

    Attributes:
        num_groups: B and C are shared by ``num_heads / num_groups`` heads each.
        num_norm_groups: the norm on the result runs over this many equal parts.
        step_limits: bounds of the step.
        has_bias: both projections are affine; `has_conv_bias` likewise the convolution.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel: int
    num_norm_groups: int = 1
    step_limits: tuple[float, float] = (0.0, float("inf"))
    has_bias: bool = False
    has_conv_bias: bool = True

    @property
    def num_channels(self) -> int:
        """Columns of the convolution: x, B and C."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """LFM2's gated short convolution."""

    kernel: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward layer of routed experts.

    Each token's contributions are summed in order of the expert's id; equal scores go to the lower
    id.

    Attributes:
        num_experts: routed experts.
        num_chosen: experts per token.
        intermediate_size: width of one expert.
        scoring: ``softmax`` or ``sigmoid`` of all logits; ``softmax_chosen`` or ``sigmoid_chosen``:
            the logits rank, and the chosen ones become weights.
        is_normalized: the chosen scores are divided by their sum.
        routed_scale: factor on the chosen scores.
        num_groups: experts are split into this many equal groups, of which `num_chosen_groups`
            compete.
        group_score: a group's score: the ``max`` of its experts', or the sum of its best two
            (``top2``).
        scales_input: the score multiplies an expert's input instead of its output (Llama 4).
        shared_size: width of the shared expert that every token uses; 0 for none.
        has_shared_gate: the shared expert's output is multiplied by a learned sigmoid gate.
        has_score_bias: a bias per expert takes part in the choice, not in the weights
            (DeepSeek-V3).
        has_expert_scale: a chosen expert's weight is multiplied by a learned number of its own.
        has_router_bias: the router is affine.
        has_bias: experts' projections are affine.
        is_gated: as in `LayerConfig`, of routed and shared experts.
        activation: as in `LayerConfig`; ``clamped_swiglu`` is gpt-oss's, with `clamp` and `alpha`.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    scoring: str = "softmax"
    is_normalized: bool = False
    routed_scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    scales_input: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    has_score_bias: bool = False
    has_expert_scale: bool = False
    has_router_bias: bool = False
    has_bias: bool = False
    is_gated: bool = True
    activation: str = "silu"
    clamp: float = 7.0
    alpha: float = 1.702


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer's attention and feed-forward geometry.

    Attributes:
        scale: factor on q·k, usually ``key_dim ** -0.5``.
        intermediate_size: width of the dense feed-forward part (0 when there are only experts).
        activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``relu``.
        rope: rotary embedding, None for a layer without.
        window: sliding window; query p sees p-window+1..p. None for all past tokens.
        chunk: query p sees from ``p // chunk * chunk``. None for all past tokens.
        softcap: cap on attention logits, None for none.
        qk_norm: RMS norm of queries and keys before the rotation: per ``head``, over ``all`` heads
            at once; ``unit``: per head without a weight, after the rotation (Llama 4); None for
            none.
        has_sinks: a learned logit per head takes part in the softmax without a value (gpt-oss).
        query_temperature: (floor, factor, start): queries at position p are multiplied by
            ``1 + factor * log(1 + floor((p + start) / floor))`` (arXiv:2501.19399; Llama 4). None for
            none.
        has_gate: attention's output is multiplied by a sigmoid gate that the query projection also
            yields (Qwen3-Next).
        share_with: index of the layer whose keys and values this layer reads instead of its own.
        has_value_norm: values are RMS-normed per head, without a weight.
        keys_are_values: values are the projected keys before their norm; there is no projection of them.
        is_gated: the feed-forward part is ``act(gate) * up`` rather than ``act(up)``.
        sparsity: share of the gate's elements that are cut to 0 where their distribution is normal
            (Gemma 3n); 0 for none.
        latent: set for multi-head latent attention.
        state: set for a token mixer with a recurrent state instead of attention; heads and dims are
            then 0.
        experts: set for a layer of experts.
        has_both: the experts work beside the dense part, on the residual stream itself, and the sum of both,
            each normed, is the layer's feed-forward result (Gemma 4).
        has_mixer: the layer has a token mixer at all, and `has_feed_forward` likewise.
    """

    num_heads: int = 0
    num_kv_heads: int = 0
    key_dim: int = 1
    value_dim: int = 1
    scale: float = 1.0
    intermediate_size: int = 0
    activation: str = "silu"
    rope: RopeConfig | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    qk_norm: str | None = None
    has_sinks: bool = False
    query_temperature: tuple[float, float, float] | None = None
    has_gate: bool = False
    share_with: int | None = None
    has_value_norm: bool = False
    keys_are_values: bool = False
    is_gated: bool = True
    sparsity: float = 0.0
    latent: LatentConfig | None = None
    state: DeltaNetConfig | MambaConfig | ShortConvConfig | None = None
    experts: ExpertsConfig | None = None
    has_both: bool = False
    has_mixer: bool = True
    has_feed_forward: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A whole decoder.

    Attributes:
        max_positions: the longest context.
        regimes: which lengths of a sequence turn alike, where rotations depend on the length; else None.
        norm: ``rms`` or ``layer``.
        norm_offset: added to the norm weights of a Hugging Face folder (Gemma stores w - 1; a GGUF
            file of the same model stores w).
        norm_bias: layer norms carry a bias.
        norm_weight: norms carry a weight at all (OLMo 1 does not).
        tie_embeddings: the output head is the embedding matrix.
        head_bias: the output head carries a bias.
        is_parallel: attention and feed-forward both read the layer's input, and both are added to
            it.
        embedding_scale: factor on the embedded tokens.
        residual_scale: factor on what each part adds to the residual stream.
        logit_scale: factor on the logits.
        logit_softcap: logits become ``cap * tanh(logits / cap)``; None for none.
        num_learned_positions: rows of a learned position embedding; 0 for none.
        position_offset: added to a position before it is looked up there.
        per_layer_size: width of an embedding of each token for each layer (Gemma 3n and 4); 0 for none.
        per_layer_vocab_size: rows of that embedding; 0 for those of the usual one.
        per_layer_activation: of the gate on it.
        num_streams: parallel residual streams (Gemma 3n's AltUp); 0 for the usual one.
        laurel_rank: of the low-rank residual beside attention that goes with them.
        has_layer_scale: each layer's result is multiplied by a learned number.
        qkv_bias: q, k and v carry a bias vector, and `output_bias`, `mlp_bias` likewise.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    tie_embeddings: bool
    regimes: PositionRegimes | None = None
    norm: str = "rms"
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_weight: bool = True
    head_bias: bool = False
    is_parallel: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_learned_positions: int = 0
    position_offset: int = 0
    per_layer_size: int = 0
    per_layer_vocab_size: int = 0
    per_layer_activation: str = "gelu_tanh"
    num_streams: int = 0
    laurel_rank: int = 0
    has_layer_scale: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: everything that distinguishes it, as data.

    Attributes:
        name: for messages.
        architectures: ``architectures`` entries of config.json that belong to it.
        gguf_architectures: ``general.architecture`` values that belong to it.
        read: text configuration to `DecoderConfig`; refuses what the decoder does not do, by name.
        hf_names: tensor names in a Hugging Face folder.
        gguf_names: tensor names in a GGUF file; None when the family has no GGUF reader here.
        gguf_rope_interleaved: GGUF files of this family store q and k rows so that rotary pairs are
            neighbours.
        fused_rows: for files that store q, k and v in one matrix of another row order: the order's
            row indices, q rows first, then k, then v.
        is_transposed: matrices of a Hugging Face folder are stored ``[in, out]`` (GPT-2).
        variant: the family to take instead for a configuration, where one architecture's name
            covers several.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    read: Callable[[Config], DecoderConfig]
    hf_names: TensorNames
    gguf_names: TensorNames | None = None
    gguf_rope_interleaved: bool = False
    fused_rows: Callable[[LayerConfig], Any] | None = None
    is_transposed: bool = False
    variant: Callable[[Config, Family], Family] | None = None

    def describe(self, config: Config) -> DecoderConfig:
        """Read a configuration, or the text part of one with pictures or sound.

        A field that it leaves out means what its model type implies.

        Raises:
            ModelError: a field is missing or cannot be meant.
            UnsupportedModelError: what the decoder does not compute, by name.
        """
        inner = config.get("text_config")
        is_nested = isinstance(inner, Mapping)
        merged = {**config, **inner} if isinstance(inner, Mapping) else config
        return self.read(with_absent_fields(merged, is_nested))
