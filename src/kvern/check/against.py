"""Another library's forward passes as the answer to compare with, and how clear the experts' choices are."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvern.core.plan import Chunk
from kvern.errors import UsageError
from kvern.models.decoder import Decoder
from kvern.models.feed_forward import DenseBesideExperts, Experts

F32 = npt.NDArray[np.float32]

LIBRARIES = ("transformers",)

TOLERANCE = 2e-4
"""Share of a row's range by which two float32 computations of a model may differ."""

EXACT_MARGIN = 1e-4
"""Difference between the last expert chosen and the first left out below which a choice is a near tie."""


class Oracle(Protocol):
    """Gives the logits of full passes.

    Attributes:
        name: for people, with its version.
        limit: longest pass in tokens whose logits fit in memory.
    """

    name: str
    limit: int

    def logits(self, tokens: Sequence[int]) -> F32:
        """``[len(tokens), vocab_size]`` of one pass over exactly these tokens."""
        ...


class Margins:
    """How clear the least clear choice of experts is for each position of one sequence, over all layers."""

    def __init__(self, num_tokens: int) -> None:
        """Args: num_tokens: of the sequence."""
        self.least: F32 = np.full(num_tokens, np.inf, np.float32)
        self._rows = slice(0, num_tokens)

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """The positions of the step that follows."""
        (chunk,) = chunks
        self._rows = slice(chunk.start, chunk.start + chunk.length)

    def note(self, margin: F32) -> None:
        """One layer's margins in that step."""
        own = self.least[self._rows]
        np.minimum(own, margin, out=own)

    def first_unclear(self, limit: float) -> int:
        """The first position whose experts might have been chosen otherwise; all later ones attend to it."""
        unclear = np.flatnonzero(self.least < limit)
        return int(unclear[0]) if len(unclear) else len(self.least)


@contextlib.contextmanager
def margins_of(decoder: Decoder, num_tokens: int) -> Iterator[Margins]:
    """Listens to a decoder's experts; without any, every choice is clear."""
    margins = Margins(num_tokens)
    parts = [layer.feed_forward for layer in decoder.layers]
    routed = [part.experts if isinstance(part, DenseBesideExperts) else part for part in parts]
    experts = [part for part in routed if isinstance(part, Experts)]
    for part in experts:
        part.on_margin = margins.note
    try:
        yield margins
    finally:
        for part in experts:
            part.on_margin = None


class Transformers:
    """The same file read by Hugging Face transformers, in float32."""

    MAX_LOGITS_BYTES = 1 << 30

    def __init__(self, path: Path, vocab_size: int, *, depends_on_length: bool) -> None:
        """Load a folder or a GGUF file.

        Args:
            path: folder or file.
            vocab_size: logits per row.
            depends_on_length: the model's rotations change with the length of a pass.

        Raises:
            UsageError: a package is missing, or transformers cannot load the model.
        """
        torch, transformers = require("torch"), require("transformers")
        if path.is_file():
            require("gguf")
        self.name = f"transformers {transformers.__version__}"
        self.limit = self.MAX_LOGITS_BYTES // (4 * vocab_size)
        self._torch = torch
        self._vocab_size = vocab_size
        self._depends_on_length = depends_on_length
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        place = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                place[0],
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                **place[1],
            ).eval()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"{self.name} cannot load {path} ({type(error).__name__}: {reason}): check it without "
                "--against, or with a version of transformers that knows the model"
            ) from error

    def logits(self, tokens: Sequence[int]) -> F32:
        """See `Oracle`. A pass of one token goes first where it must put frequencies back."""
        if self._depends_on_length:
            self._pass(tokens[:1])
        found: F32 = self._pass(tokens)[:, : self._vocab_size]
        return found

    def _pass(self, tokens: Sequence[int]) -> Any:
        torch = self._torch
        with torch.no_grad():
            ids = torch.tensor([list(tokens)], dtype=torch.int64)
            return self._model(ids, use_cache=False).logits[0].float().numpy()


def require(name: str) -> Any:
    """A package of the other library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"comparing with transformers needs the package {name}, which is not installed: "
            "pip install torch transformers gguf"
        ) from error
