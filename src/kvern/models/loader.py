"""Takes a family's tensors by their names, checks their shapes, and hands them to the backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvern.errors import UnsupportedModelError
from kvern.kernels.protocol import Backend, HostTensor, Weight
from kvern.models.config import DecoderConfig, Family, RopeConfig
from kvern.models.rope import RopeTable
from kvern.models.rowwise import Norm
from kvern.models.weights import WeightSource, transposed

F32 = npt.NDArray[np.float32]

ROOTS = ("model.language_model.", "language_model.model.", "")
"""What may stand in a folder for the ``model.`` (or ``transformer.``) before most names.

Text models inside multimodal ones, and checkpoints of the bare model.
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
                f"{family.name} models are read from Hugging Face folders only, "
                f"and {source.path} is a GGUF file"
            )
        if source.is_gguf and LONG_FACTORS in source:
            raise UnsupportedModelError(
                f"{source.path} has rotary factors for two lengths ({LONG_FACTORS}), "
                "which kvern reads from Hugging Face folders only"
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

    def name(self, template: str, **indices: int) -> str:
        """A name with its indices filled in, as the file spells it."""
        name = template.format(**indices)
        own, root = self._root
        return root + name.removeprefix(own) if name.startswith(own) else name

    def prepare(self, *tensors: HostTensor) -> Weight:
        """A weight of these matrices, stacked by rows."""
        return self.backend.prepare(tensors, self.weights_format)

    def matrix(self, template: str, rows: int, cols: int, **indices: int) -> HostTensor:
        """A matrix ``[out, in]``, whichever way round the file has it."""
        name = self.name(template, **indices)
        if self.family.is_transposed and not self.source.is_gguf and indices:
            return transposed(self.source.matrix(name, cols, rows))
        return self.source.matrix(name, rows, cols)

    def bias(self, wanted: bool, *parts: tuple[str, int], **indices: int) -> F32 | None:
        """The biases beside weights of these names and sizes, one after the other."""
        if not wanted:
            return None
        named = ((self.name(bias_name(template), **indices), size) for template, size in parts)
        return np.concatenate([self.source.vector(name, size) for name, size in named])

    def norm(self, template: str | None, **indices: int) -> Norm | None:
        """A norm over the hidden size; None for a name that the family does not have."""
        if template is None:
            return None
        config, size = self.config, self.config.hidden_size
        weight = np.ones(size, np.float32)
        if config.norm_weight:
            weight = self.norm_weight(template, size, **indices)
        bias = self.bias(config.norm_bias, (template, size), **indices)
        return Norm(weight, bias, config.norm_eps, config.norm == "layer")

    def norm_weight(self, template: str, size: int, **indices: int) -> F32:
        """A norm's weight, with the family's offset where the file leaves it out."""
        weight = self.source.vector(self.name(template, **indices), size)
        offset = 0.0 if self.source.is_gguf else self.config.norm_offset
        return weight + np.float32(offset) if offset else weight

    # -- the ends ----------------------------------------------------------------------------------

    def ends(self) -> tuple[Weight, Weight, F32 | None]:
        """The embedding, the output head (the same object when tied) and the head's bias."""
        config, names = self.config, self.names
        shape = config.vocab_size, config.hidden_size
        embedding = self.prepare(self.matrix(names.embedding, *shape))
        head_name = names.head
        if self._root[1].startswith("language_model.") and head_name not in self.source:
            head_name = "language_model." + head_name
        tied = config.tie_embeddings or (self.source.is_gguf and head_name not in self.source)
        head = embedding if tied else self.prepare(self.source.matrix(head_name, *shape))
        return embedding, head, self.bias(config.head_bias, (names.head, config.vocab_size))

    def final_norm(self) -> Norm:
        """The norm before the head."""
        norm = self.norm(self.names.final_norm)
        assert norm is not None
        return norm

    def position_embedding(self) -> Weight | None:
        """The learned positions, where the family has them."""
        rows = self.config.num_learned_positions
        if not rows:
            return None
        return self.prepare(self.matrix(self.names.positions, rows, self.config.hidden_size))

    def layer_scale(self, index: int) -> np.float32 | None:
        """The number that a layer's result is multiplied by, where the family has one."""
        if not self.config.has_layer_scale:
            return None
        return np.float32(self.source.vector(self.name(self.names.layer_scale, i=index), 1)[0])

    def norms(self, index: int) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
        """A layer's norms: before attention, after it, before the feed-forward part, after it."""
        names = self.names
        return (
            self.norm(names.attention_norm, i=index),
            self.norm(names.post_attention_norm, i=index),
            self.norm(names.mlp_norm, i=index),
            self.norm(names.post_mlp_norm, i=index),
        )

    def rope_table(self, rope: RopeConfig) -> RopeTable:
        """One table per distinct rotation."""
        if rope not in self._rope_tables:
            factors, name = None, self.names.rope_factors
            if name is not None and name in self.source:
                factors = self.source.vector(name, rope.rotary_dim // 2)
            self._rope_tables[rope] = RopeTable(rope, factors)
        return self._rope_tables[rope]


def bias_name(weight: str) -> str:
    """``x.weight`` has the bias ``x.bias``; a parameter ``x`` has ``x_bias``."""
    if weight.endswith(".weight"):
        return weight.removesuffix(".weight") + ".bias"
    return weight + "_bias"
