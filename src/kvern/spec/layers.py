"""What a model needs from its cache, layer by layer, and the facts a planner asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from types import MappingProxyType

from kvern.spec.codec import BF16, Codec, Region, parse_kv_format
from kvern.spec.content import Content, State, StatePart, Stream
from kvern.spec.reach import All, Reach
from kvern.spec.regimes import PositionRegimes


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One cache of one layer: content x reach, and how its streams are stored.

    Attributes:
        content: what a token leaves behind.
        reach: which past tokens are still needed, in token positions.
        stride: one entry per `stride` tokens (compressed attention); 1 = an entry per token.
        k_codec: stored form of every stream but values.
        v_codec: stored form of values.
        share_with: index of the layer whose cache this layer reads; it then stores nothing.
        follows_format: whether `with_codecs` may change the codecs; False where the model fixes
            the stored form itself.
    """

    content: Content
    reach: Reach
    stride: int = 1
    k_codec: Codec = BF16
    v_codec: Codec = BF16
    share_with: int | None = None
    follows_format: bool = True

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"stride is {self.stride}: it must be positive")

    @property
    def is_state(self) -> bool:
        """Whether the cache is a fixed-size state instead of a run of entries."""
        return isinstance(self.content, State)

    @property
    def streams(self) -> tuple[tuple[Stream, Codec], ...]:
        """Streams that this layer stores itself, each with its codec, in page order."""
        if self.share_with is not None:
            return ()
        return tuple(
            (s, self.v_codec if s.is_value else self.k_codec) for s in self.content.streams
        )

    @property
    def token_grain(self) -> int:
        """A block holds a multiple of this: the stride times the codecs' token groups."""
        return self.stride * lcm(*(codec.token_group for _, codec in self.streams), 1)

    @property
    def is_wide(self) -> bool:
        """Whether every stream is stored as it was computed, so that open blocks need no form of their own."""
        return all(codec.is_wide for _, codec in self.streams)

    @property
    def fixed_bytes(self) -> int:
        """Bytes per sequence whatever its length (states)."""
        return 0 if self.share_with is not None else self.content.fixed_bytes

    @property
    def bytes_per_token(self) -> int | float:
        """Stored bytes that a token adds, scales included; a whole number is an int."""
        grain = self.token_grain
        return ratio(self.block_bytes(grain), grain)

    def block_bytes(self, num_tokens: int) -> int:
        """Exact bytes of the entries of `num_tokens` tokens, of one layer."""
        num_entries = -(-num_tokens // self.stride)
        return sum(
            codec.stored_bytes(num_entries, stream.num_heads, stream.dim)
            for stream, codec in self.streams
        )

    def block_regions(self, num_tokens: int) -> Iterator[tuple[Stream, Codec, tuple[Region, ...]]]:
        """Every stream with the regions of its stored form for a block of `num_tokens` tokens."""
        num_entries = -(-num_tokens // self.stride)
        for stream, codec in self.streams:
            yield stream, codec, codec.regions(num_entries, stream.num_heads, stream.dim)

    def context_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` needs here at its peak, without block rounding.

        A window of w tokens counts w entries at most, a chunk of c counts c.
        """
        return self.fixed_bytes + self.block_bytes(self.reach.max_visible(num_tokens))

    def with_codecs(self, k_codec: Codec, v_codec: Codec) -> KVCacheSpec:
        """The same cache in another format.

        A state keeps its dtypes, except that full precision widens its 16-bit parts.
        """
        if not self.follows_format:
            return self
        content = self.content
        if isinstance(content, State) and k_codec.dtype == "fp32":
            parts = tuple(StatePart(part.name, part.shape, "fp32") for part in content.parts)
            content = State(parts)
        return replace(self, content=content, k_codec=k_codec, v_codec=v_codec)

    def open_regions(self, num_tokens: int) -> Iterator[tuple[Stream, Codec, tuple[Region, ...]]]:
        """The narrow streams in the form of an open block; wide ones are open in their page itself."""
        num_entries = -(-num_tokens // self.stride)
        for stream, codec in self.streams:
            if not codec.is_wide:
                yield stream, BF16, BF16.regions(num_entries, stream.num_heads, stream.dim)


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Weights of one layer, counted in elements.

    Attributes:
        attention: the token mixer, whatever its kind.
        mlp: the dense feed-forward part and shared experts: used by every token.
        experts: all routed experts together.
        router: the expert router.
        norms: norms and other vectors of the residual stream.
        active_experts: elements of the routed experts that one token uses.
    """

    attention: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norms: int = 0
    active_experts: int = 0

    @property
    def total(self) -> int:
        """All elements of the layer."""
        return self.attention + self.mlp + self.experts + self.router + self.norms

    @property
    def active(self) -> int:
        """Elements that one token's computation uses."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its kind in the words of its configuration, and the caches it needs.

    A layer without caches (a feed-forward layer of a hybrid) has an empty tuple.
    """

    index: int
    kind: str
    caches: tuple[KVCacheSpec, ...]
    parameters: LayerParameters | None = None

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes that a token adds to this layer while every position is still visible."""
        return sum(cache.bytes_per_token for cache in self.caches)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of this layer's states per sequence."""
        return sum(cache.fixed_bytes for cache in self.caches)

    def context_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` needs here at its peak."""
        return sum(cache.context_bytes(num_tokens) for cache in self.caches)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Mixture of experts: counts and widths as the configuration states them."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int | None
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights of the model outside its layers, and the sums, counted in elements."""

    embedding: int
    lm_head: int
    final_norm: int
    layers: int
    active_layers: int

    @property
    def total(self) -> int:
        """All elements of the main model, multi-token-prediction layers not included."""
        return self.embedding + self.lm_head + self.final_norm + self.layers

    @property
    def active(self) -> int:
        """Elements that one token's computation uses; a tied embedding counts once, as head."""
        head = self.lm_head or self.embedding
        return head + self.final_norm + self.active_layers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its cache and its planner see it; no tensor is ever looked at.

    Attributes:
        name: catalogue name, folder or file stem.
        architecture: class name in the configuration, or the GGUF architecture.
        family: `model_type` of the (text) configuration.
        max_model_len: context limit in tokens, rope scaling included; None = not stated.
        regimes: which lengths of a sequence turn alike, where a sequence that grows is computed again;
            None = nothing depends on the length.
        num_layers: decoder layers; multi-token-prediction layers are in `mtp_layers`.
        layers: one entry per decoder layer, in order.
        num_kv_heads: KV heads of the first attention layer (layers may differ: see `layers`).
        parameters: exact counts, or None when the configuration lacks a width
            (`missing_fields` names it).
        details: facts of the family that engines disagree on, e.g. the state dtype it names.
    """

    name: str
    architecture: str
    family: str
    num_layers: int
    layers: tuple[LayerSpec, ...]
    max_model_len: int | None = None
    regimes: PositionRegimes | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    experts: ExpertSpec | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool = False
    mtp_layers: tuple[LayerSpec, ...] = ()
    parameters: ParameterCount | None = None
    missing_fields: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def kv_bytes_per_token(self) -> int | float:
        """Bytes that a token adds over all layers while every position is still visible."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def kv_growing_bytes_per_token(self) -> int | float:
        """Bytes that a token adds for good, once windows and chunks have stopped growing."""
        caches = (cache for layer in self.layers for cache in layer.caches)
        return sum(cache.bytes_per_token for cache in caches if isinstance(cache.reach, All))

    @property
    def lenders(self) -> frozenset[int]:
        """Layers whose cache other layers read too."""
        caches = (cache for layer in self.layers for cache in layer.caches)
        return frozenset(c.share_with for c in caches if c.share_with is not None)

    @property
    def kv_fixed_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(layer.fixed_bytes for layer in self.layers)

    def context_bytes(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` needs at its peak, without block rounding."""
        return sum(layer.context_bytes(num_tokens) for layer in self.layers)

    def with_kv_format(self, kv_format: str) -> ModelSpec:
        """The same model with its caches stored in a named format or per-layer mix.

        Multi-token-prediction layers take the format of the last layer.

        Raises:
            UsageError: the format or a layer in it does not exist.
        """
        codecs = parse_kv_format(kv_format, self.num_layers)

        def converted(layer: LayerSpec, pair: tuple[Codec, Codec]) -> LayerSpec:
            return replace(layer, caches=tuple(cache.with_codecs(*pair) for cache in layer.caches))

        return replace(
            self,
            layers=tuple(map(converted, self.layers, codecs)),
            mtp_layers=tuple(converted(layer, codecs[-1]) for layer in self.mtp_layers),
        )


def ratio(numerator: int, denominator: int) -> int | float:
    """`numerator / denominator`, as an int where it is whole."""
    quotient, remainder = divmod(numerator, denominator)
    return numerator / denominator if remainder else quotient
