"""Takes a family's tensors by their names, checks their shapes, and hands them to the backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvern.errors import UnsupportedModelError
from kvern.kernels.protocol import AttendParams, Backend, HostTensor, Weight
from kvern.models.attention import AttentionWeights, HeadsAttention
from kvern.models.config import DecoderConfig, ExpertsConfig, Family, RopeConfig
from kvern.models.feed_forward import Dense, DenseWeights, Experts, ExpertsWeights
from kvern.models.latent import LatentAttention, LatentWeights
from kvern.models.rope import RopeTable
from kvern.models.rowwise import Norm
from kvern.models.weights import WeightSource, decoded, take_rows, transposed

F32 = npt.NDArray[np.float32]

ROOTS = ("model.language_model.", "language_model.model.", "")
"""What may stand in a folder for the ``model.`` (or ``transformer.``) before most names: text models inside
multimodal ones, and checkpoints of the bare model.
"""

LONG_FACTORS = "rope_factors_long.weight"


class Loader:
    """Prepares the weights of one decoder."""

    def __init__(
        self,
        config: DecoderConfig,
        family: Family,
        source: WeightSource,
        backend: Backend,
        weights_format: str,
    ) -> None:
        """Args: as `kvern.models.decoder.Decoder`.

        Raises:
            UnsupportedModelError: a GGUF file of a family that is read from folders only.
        """
        names = family.gguf_names if source.is_gguf else family.hf_names
        if names is None:
            raise UnsupportedModelError(
                f"{family.name} models are read from Hugging Face folders only, and {source.path} is a GGUF file"
            )
        if source.is_gguf and LONG_FACTORS in source:
            raise UnsupportedModelError(
                f"{source.path} has rotary factors for two lengths ({LONG_FACTORS}), which kvern reads from "
                "Hugging Face folders only"
            )
        self.names = names
        self.family = family
        self.source = source
        self.backend = backend
        self.weights_format = weights_format
        self.config = self._with_rotation_of_file(config)
        self._root = self._find_root()
        self._rope_tables: dict[RopeConfig, RopeTable] = {}

    def _with_rotation_of_file(self, config: DecoderConfig) -> DecoderConfig:
        """The configuration with the rotary pairing that the file's row order has."""
        if not self.source.is_gguf:
            return config
        interleaved = self.family.gguf_rope_interleaved
        layers = tuple(
            layer
            if layer.rope is None
            else replace(layer, rope=replace(layer.rope, interleaved=interleaved))
            for layer in config.layers
        )
        return replace(config, layers=layers)

    def _find_root(self) -> tuple[str, str]:
        """(prefix of our names, what the file has instead)."""
        embedding = self.names.embedding
        own = embedding.split(".")[0] + "."
        if embedding not in self.source:
            for root in ROOTS:
                if root + embedding.removeprefix(own) in self.source:
                    return own, root
        return own, own

    # -- tensors -----------------------------------------------------------------------------------

    def _name(self, template: str, **indices: int) -> str:
        name = template.format(**indices)
        own, root = self._root
        return root + name.removeprefix(own) if name.startswith(own) else name

    def _prepare(self, *tensors: HostTensor) -> Weight:
        return self.backend.prepare(tensors, self.weights_format)

    def _matrix(self, template: str, rows: int, cols: int, **indices: int) -> HostTensor:
        name = self._name(template, **indices)
        if self.family.is_transposed and not self.source.is_gguf and indices:
            return transposed(self.source.matrix(name, cols, rows))
        return self.source.matrix(name, rows, cols)

    def _bias(self, wanted: bool, *parts: tuple[str, int], **indices: int) -> F32 | None:
        """The biases beside weights of these names and sizes, one after the other."""
        if not wanted:
            return None
        named = ((self._name(_bias_name(template), **indices), size) for template, size in parts)
        return np.concatenate([self.source.vector(name, size) for name, size in named])

    def _norm(self, template: str | None, **indices: int) -> Norm | None:
        """A norm over the hidden size; None for a name that the family does not have."""
        if template is None:
            return None
        config, size = self.config, self.config.hidden_size
        weight = np.ones(size, np.float32)
        if config.norm_weight:
            weight = self._norm_weight(template, size, **indices)
        bias = self._bias(config.norm_bias, (template, size), **indices)
        return Norm(weight, bias, config.norm_eps, config.norm == "layer")

    def _norm_weight(self, template: str, size: int, **indices: int) -> F32:
        weight = self.source.vector(self._name(template, **indices), size)
        offset = 0.0 if self.source.is_gguf else self.config.norm_offset
        return weight + np.float32(offset) if offset else weight

    # -- the ends ----------------------------------------------------------------------------------

    def ends(self) -> tuple[Weight, Weight, F32 | None]:
        """The embedding, the output head (the same object when tied) and the head's bias."""
        config, names = self.config, self.names
        shape = config.vocab_size, config.hidden_size
        embedding = self._prepare(self._matrix(names.embedding, *shape))
        head_name = names.head
        if self._root[1].startswith("language_model.") and head_name not in self.source:
            head_name = "language_model." + head_name
        tied = config.tie_embeddings or (self.source.is_gguf and head_name not in self.source)
        head = embedding if tied else self._prepare(self.source.matrix(head_name, *shape))
        return embedding, head, self._bias(config.head_bias, (names.head, config.vocab_size))

    def final_norm(self) -> Norm:
        """The norm before the head."""
        norm = self._norm(self.names.final_norm)
        assert norm is not None
        return norm

    def position_embedding(self) -> Weight | None:
        """The learned positions, where the family has them."""
        rows = self.config.num_learned_positions
        if not rows:
            return None
        return self._prepare(self._matrix(self.names.positions, rows, self.config.hidden_size))

    def norms(self, index: int) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
        """A layer's norms: before attention, after it, before the feed-forward part, after it."""
        names = self.names
        return (
            self._norm(names.attention_norm, i=index),
            self._norm(names.post_attention_norm, i=index),
            self._norm(names.mlp_norm, i=index),
            self._norm(names.post_mlp_norm, i=index),
        )

    # -- attention ---------------------------------------------------------------------------------

    def attention(self, index: int) -> HeadsAttention | LatentAttention:
        """One layer's attention."""
        layer, names = self.config.layers[index], self.names
        params = AttendParams(
            scale=layer.scale,
            window=layer.window,
            chunk=layer.chunk,
            softcap=layer.softcap,
            sink_logits=self.source.vector(self._name(names.sinks, i=index), layer.num_heads)
            if layer.has_sinks
            else None,
        )
        rope = None if layer.rope is None else self._rope_table(layer.rope)
        if layer.latent is not None:
            assert rope is not None
            return LatentAttention(layer, self._latent_weights(index), params, rope)
        return HeadsAttention(layer, self._attention_weights(index), params, rope)

    def _attention_weights(self, index: int) -> AttentionWeights:
        config, names, layer = self.config, self.names, self.config.layers[index]
        hidden = config.hidden_size
        q_rows = layer.num_heads * (layer.key_dim + (layer.value_dim if layer.has_gate else 0))
        k_rows, v_rows = layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim
        if names.qkv is not None:
            parts = [(names.qkv, q_rows + k_rows + v_rows)]
        else:
            parts = [(names.q, q_rows), (names.k, k_rows), (names.v, v_rows)]
        tensors = [self._matrix(name, rows, hidden, i=index) for name, rows in parts]
        bias = self._bias(config.qkv_bias, *parts, i=index)
        order = None
        if self.family.fused_rows is not None and not self.source.is_gguf:
            order = self.family.fused_rows(layer)
        if order is not None:
            tensors = [take_rows(tensors[0], order)]
            bias = None if bias is None else bias[order]
        q_norm = k_norm = None
        if layer.qk_norm == "unit":
            q_norm = k_norm = np.ones(layer.key_dim, np.float32)
        elif layer.qk_norm is not None:
            whole = layer.qk_norm == "all"
            q_size = layer.key_dim * (layer.num_heads if whole else 1)
            k_size = layer.key_dim * (layer.num_kv_heads if whole else 1)
            q_norm = self._norm_weight(names.q_norm, q_size, i=index)
            k_norm = self._norm_weight(names.k_norm, k_size, i=index)
        return AttentionWeights(
            qkv=self._prepare(*tensors),
            qkv_bias=bias,
            output=self._prepare(
                self._matrix(names.output, hidden, layer.num_heads * layer.value_dim, i=index)
            ),
            output_bias=self._bias(config.output_bias, (names.output, hidden), i=index),
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def _latent_weights(self, index: int) -> LatentWeights:
        config, names, layer = self.config, self.names, self.config.layers[index]
        latent, hidden = layer.latent, config.hidden_size
        assert latent is not None
        q_rows = layer.num_heads * (latent.nope_dim + latent.rope_dim)
        entry = latent.latent_dim + latent.rope_dim
        rank = latent.query_rank
        q_down = q_down_norm = q_down_bias = None
        if rank is None:
            q = self._matrix(names.q, q_rows, hidden, i=index)
        else:
            q = self._matrix(names.q_up, q_rows, rank, i=index)
            q_down = self._prepare(self._matrix(names.q_down, rank, hidden, i=index))
            q_down_norm = self.source.vector(self._name(names.q_down_norm, i=index), rank)
            q_down_bias = self._bias(config.qkv_bias, (names.q_down, rank), i=index)
        k_up, v_up = self._absorbed(index)
        return LatentWeights(
            q_down=q_down,
            q_down_bias=q_down_bias,
            q_down_norm=q_down_norm,
            q=self._prepare(q),
            kv_down=self._prepare(self._matrix(names.kv_down, entry, hidden, i=index)),
            kv_down_bias=self._bias(config.qkv_bias, (names.kv_down, entry), i=index),
            kv_down_norm=self.source.vector(
                self._name(names.kv_down_norm, i=index), latent.latent_dim
            ),
            k_up=k_up,
            v_up=v_up,
            output=self._prepare(
                self._matrix(names.output, hidden, layer.num_heads * layer.value_dim, i=index)
            ),
            output_bias=self._bias(config.output_bias, (names.output, hidden), i=index),
        )

    def _absorbed(self, index: int) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Per head: the key expansion transposed, and the value expansion."""
        names, layer = self.names, self.config.layers[index]
        latent, heads, value_dim = layer.latent, layer.num_heads, layer.value_dim
        assert latent is not None
        k_up = self._name(names.k_up, i=index)
        if names.k_up and k_up in self.source:
            v_up = self._name(names.v_up, i=index)
            k_parts = self.source.matrices(k_up, heads, latent.latent_dim, latent.nope_dim)
            v_parts = self.source.matrices(v_up, heads, value_dim, latent.latent_dim)
        else:
            width = latent.nope_dim + value_dim
            both = self._matrix(names.kv_up, heads * width, latent.latent_dim, i=index)
            rows = np.arange(heads * width).reshape(heads, width)
            k_parts = [transposed(take_rows(both, part[: latent.nope_dim])) for part in rows]
            v_parts = [take_rows(both, part[latent.nope_dim :]) for part in rows]
        return tuple(map(self._prepare, k_parts)), tuple(map(self._prepare, v_parts))

    def _rope_table(self, rope: RopeConfig) -> RopeTable:
        """One table per distinct rotation."""
        if rope not in self._rope_tables:
            factors, name = None, self.names.rope_factors
            if name is not None and name in self.source:
                factors = self.source.vector(name, rope.rotary_dim // 2)
            self._rope_tables[rope] = RopeTable(rope, factors)
        return self._rope_tables[rope]

    # -- feed-forward ------------------------------------------------------------------------------

    def feed_forward(self, index: int) -> Dense | Experts:
        """One layer's feed-forward part."""
        layer, names = self.config.layers[index], self.names
        if layer.experts is not None:
            return Experts(layer.experts, self._experts_weights(index, layer.experts))
        parts = (names.gate, names.up) if layer.is_gated else (names.up,)
        gate_up_name = names.gate_up if layer.is_gated else None
        return Dense(
            layer, self._dense(index, parts, gate_up_name, names.down, layer.intermediate_size)
        )

    def _dense(
        self, index: int, parts: tuple[str | None, ...], fused: str | None, down: str, inner: int
    ) -> DenseWeights:
        config, hidden = self.config, self.config.hidden_size
        named = [(str(name), inner) for name in parts] if fused is None else [(fused, 2 * inner)]
        return DenseWeights(
            gate_up=self._prepare(
                *(self._matrix(name, rows, hidden, i=index) for name, rows in named)
            ),
            gate_up_bias=self._bias(config.mlp_bias, *named, i=index),
            down=self._prepare(self._matrix(down, hidden, inner, i=index)),
            down_bias=self._bias(config.mlp_bias, (down, hidden), i=index),
        )

    def _experts_weights(self, index: int, experts: ExpertsConfig) -> ExpertsWeights:
        names, hidden, count = self.names, self.config.hidden_size, experts.num_experts
        shared = shared_router = score_bias = None
        if experts.shared_size:
            parts = (names.shared_gate, names.shared_up)
            shared = self._dense(index, parts, None, names.shared_down, experts.shared_size)
        if experts.has_shared_gate:
            shared_router = self._prepare(self._row(names.shared_router, hidden, index))
        if experts.has_score_bias:
            score_bias = self.source.vector(self._name(names.score_bias, i=index), count)
        return ExpertsWeights(
            router=self._prepare(self._matrix(names.router, count, hidden, i=index)),
            router_bias=self._bias(experts.has_router_bias, (names.router, count), i=index),
            score_bias=score_bias,
            experts=self._all_experts(index, experts),
            shared=shared,
            shared_router=shared_router,
        )

    def _row(self, template: str, cols: int, index: int) -> HostTensor:
        """A matrix of one row, which a GGUF file stores as a vector."""
        name = self._name(template, i=index)
        if self.source.is_gguf:
            data = self.source.vector(name, cols).view(np.uint8)
            return HostTensor(name, "F32", 1, cols, data)
        return self.source.matrix(name, 1, cols)

    def _all_experts(self, index: int, experts: ExpertsConfig) -> tuple[DenseWeights, ...]:
        names, hidden, inner = self.names, self.config.hidden_size, experts.intermediate_size
        count = experts.num_experts
        if names.expert_gate_up is not None:
            both = self._per_expert(names.expert_gate_up, index, count, 2 * inner, hidden)
            if names.experts_interleaved:
                both = [take_rows(part, _gate_then_up(inner)) for part in both]
            gate_ups = [[part] for part in both]
        else:
            gates = self._per_expert(names.expert_gate, index, count, inner, hidden)
            ups = self._per_expert(names.expert_up, index, count, inner, hidden)
            gate_ups = [[gate, up] for gate, up in zip(gates, ups, strict=True)]
        downs = self._per_expert(names.expert_down, index, count, hidden, inner)
        gate_up_biases, down_biases = self._expert_biases(index, experts)
        return tuple(
            DenseWeights(self._prepare(*gate_up), gate_up_bias, self._prepare(down), down_bias)
            for gate_up, gate_up_bias, down, down_bias in zip(
                gate_ups, gate_up_biases, downs, down_biases, strict=True
            )
        )

    def _per_expert(
        self, template: str, index: int, count: int, rows: int, cols: int
    ) -> list[HostTensor]:
        if "{e}" in template:
            return [
                self._matrix(template, rows, cols, i=index, e=expert) for expert in range(count)
            ]
        name = self._name(template, i=index)
        if self.names.experts_transposed:
            return [transposed(part) for part in self.source.matrices(name, count, cols, rows)]
        return self.source.matrices(name, count, rows, cols)

    def _expert_biases(
        self, index: int, experts: ExpertsConfig
    ) -> tuple[list[F32 | None], list[F32 | None]]:
        """Per expert, the biases of gate and up together and of down."""
        names, hidden, inner = self.names, self.config.hidden_size, experts.intermediate_size
        count = experts.num_experts
        if not experts.has_bias:
            return [None] * count, [None] * count

        def rows(template: str, size: int) -> F32:
            name = self._name(_bias_name(template), i=index)
            return decoded(self.source.matrix(name, count, size))

        if names.expert_gate_up is not None:
            gate_up = rows(names.expert_gate_up, 2 * inner)
            if names.experts_interleaved:
                gate_up = gate_up[:, _gate_then_up(inner)]
        else:
            gate_up = np.concatenate(
                [rows(names.expert_gate, inner), rows(names.expert_up, inner)], -1
            )
        return list(gate_up), list(rows(names.expert_down, hidden))


def _bias_name(weight: str) -> str:
    """``x.weight`` has the bias ``x.bias``; a parameter ``x`` has ``x_bias``."""
    if weight.endswith(".weight"):
        return weight.removesuffix(".weight") + ".bias"
    return weight + "_bias"


def _gate_then_up(inner: int) -> npt.NDArray[np.int64]:
    """Rows of an interleaved matrix in the order gate, then up."""
    return np.concatenate([np.arange(0, 2 * inner, 2), np.arange(1, 2 * inner, 2)])
