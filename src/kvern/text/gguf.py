"""The tokenizer that a GGUF file describes in its metadata.

`tokenizer.ggml.model` names the algorithm and its rules:

| model    | algorithm                        | add_bos | add_eos | add_space_prefix |
|----------|----------------------------------|---------|---------|------------------|
| `gpt2`   | byte-level BPE, kind from `pre`  | by kind | no      | no               |
| `gemma4` | BPE on plain text, byte fallback | always  | no      | no               |
| `llama`  | SentencePiece BPE                | yes     | no      | yes              |
| `t5`     | SentencePiece unigram            | no      | yes     | no               |

These are the defaults where the file has no `add_bos_token`, `add_eos_token` or `add_space_prefix`;
of the kinds of `gpt2` those related to Llama 3, Tekken and Chameleon add BOS.

Token ids equal llama.cpp's, with four exceptions, all on purpose:

- without `parse_special` the text of a control, unknown or byte token never gives that token
  (llama.cpp reads gpt-oss's `<|start|>` and its like even then);
- a token is only taken for an end of generation, and so for a control token, if its text says so
  beyond doubt (`</s>` in Gemma is a tag for struck-out text);
- BOS is not added in front of a text that begins with BOS, nor EOS behind one that ends with it;
- `remove_extra_whitespaces` is honoured by `llama` models too, and unigram models with a full set
  of byte tokens spell out unknown characters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from kvern.errors import FileFormatError, UnsupportedModelError
from kvern.text.backend import SpecialIds
from kvern.text.bpe import BytePairEncoder
from kvern.text.matching import TokenMatcher
from kvern.text.pretokenizers import PreTokenizer, pre_tokenizer
from kvern.text.sentencepiece import SentencePieceEncoder
from kvern.text.unigram import UnigramEncoder
from kvern.text.vocabulary import (
    PREFIX,
    NamedIds,
    Vocabulary,
    read_array,
    read_flag,
    read_vocabulary,
)

_LOG: Final = logging.getLogger(__name__)
_DEFAULT_IDS: Final = {
    "gpt2": NamedIds(),
    "gemma4": NamedIds(),
    "llama": NamedIds(bos=1, eos=2, unk=0),
    "t5": NamedIds(eos=1, unk=2, pad=0),
}
# Phi-3's special tokens swallow the whitespace behind them, which no key of the file says.
_STRIPPING_NAMES: Final = ("phi-3", "phi3")
_NOT_STRIPPING: Final = ("<unk>", "<s>", "<|endoftext|>")


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int, first: bool) -> bytes: ...


class GGUFBackend:
    """A tokenizer built from GGUF metadata.

    Args:
        metadata: the file's key-value pairs; arrays may be any sized iterable.

    Raises:
        FileFormatError: keys are missing or contradict each other.
        UnsupportedModelError: the tokenizer model or its pre-tokenizer is unknown.
    """

    has_token_bytes = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = metadata.get(f"{PREFIX}model")
        if model is None:
            raise FileFormatError(f"the file describes no tokenizer ({PREFIX}model is missing)")
        if model not in _DEFAULT_IDS:
            raise UnsupportedModelError(
                f"the tokenizer model {model!r} ({PREFIX}model) is unknown: "
                f"known are {', '.join(_DEFAULT_IDS)}"
            )
        kind = _kind(metadata, model)
        self._vocabulary = read_vocabulary(metadata, _DEFAULT_IDS[model])
        self._encoder = _encoder(metadata, model, kind, self._vocabulary)
        vocabulary = self._vocabulary
        texts = vocabulary.tokens
        user_defined = {texts[token_id]: token_id for token_id in vocabulary.user_defined}
        control = {texts[token_id]: token_id for token_id in vocabulary.special}
        stripping = _stripping_ids(metadata, vocabulary)
        self._with_special = TokenMatcher({**control, **user_defined}, stripping)
        self._without_special = TokenMatcher(user_defined, stripping)
        self._special = _special_ids(metadata, model, kind, vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary.tokens)

    @property
    def special(self) -> SpecialIds:
        """The named special tokens."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""
        matcher = self._with_special if parse_special else self._without_special
        ids: list[int] = []
        for piece in matcher.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._encoder.encode(piece))
        special = self._special
        if add_special_tokens and special.add_bos and ids[:1] != [special.bos_id]:
            ids[:0] = [] if special.bos_id is None else [special.bos_id]
        if add_special_tokens and special.add_eos and ids[-1:] != [special.eos_id]:
            ids += [] if special.eos_id is None else [special.eos_id]
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control or unknown token."""
        return token_id in self._vocabulary.special

    def token_bytes(self, token_id: int, *, first: bool) -> bytes:
        """What a token adds to a text; nothing for an id outside the vocabulary."""
        vocabulary = self._vocabulary
        if not 0 <= token_id < len(vocabulary.tokens):
            return b""
        if token_id in vocabulary.special or token_id in vocabulary.user_defined:
            return vocabulary.tokens[token_id].encode()
        return self._encoder.token_bytes(token_id, first)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some tokens."""
        kept = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        pieces = (self.token_bytes(i, first=n == 0) for n, i in enumerate(kept))
        return b"".join(pieces).decode(errors="replace")


def _kind(metadata: Mapping[str, Any], model: str) -> PreTokenizer | None:
    """The pre-tokenizer of a BPE model."""
    if model == "gemma4":
        return pre_tokenizer("gemma4")
    if model != "gpt2":
        return None
    name = metadata.get(f"{PREFIX}pre")
    if name is None:
        _LOG.warning(
            "the file names no pre-tokenizer (%spre is missing, as in files made before May 2024): "
            "reading it as 'default', which may give worse answers; convert the model again",
            PREFIX,
        )
        name = "default"
    return pre_tokenizer(name)


def _encoder(
    metadata: Mapping[str, Any], model: str, kind: PreTokenizer | None, vocabulary: Vocabulary
) -> _Encoder:
    if kind is not None:
        merges = read_array(metadata, "merges")
        if not merges:
            raise FileFormatError(f"a {model} tokenizer needs {PREFIX}merges")
        return BytePairEncoder(vocabulary, merges, kind)
    remove_extra_whitespaces = read_flag(metadata, "remove_extra_whitespaces", False)
    if model == "llama":
        return SentencePieceEncoder(
            vocabulary,
            add_space_prefix=read_flag(metadata, "add_space_prefix", True),
            remove_extra_whitespaces=remove_extra_whitespaces,
        )
    charsmap = bytes(byte & 0xFF for byte in read_array(metadata, "precompiled_charsmap"))
    return UnigramEncoder(
        vocabulary,
        charsmap=charsmap or None,
        add_space_prefix=read_flag(metadata, "add_space_prefix", False),
        remove_extra_whitespaces=remove_extra_whitespaces,
    )


def _special_ids(
    metadata: Mapping[str, Any], model: str, kind: PreTokenizer | None, vocabulary: Vocabulary
) -> SpecialIds:
    add_bos = read_flag(metadata, "add_bos_token", kind.add_bos if kind else model == "llama")
    named = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    return SpecialIds(
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        end_ids=vocabulary.end_ids,
        add_bos=add_bos or kind is pre_tokenizer("gemma4"),
        add_eos=read_flag(metadata, "add_eos_token", model == "t5"),
        texts={name: vocabulary.tokens[i] for name, i in named.items() if i is not None},
    )


def _stripping_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> set[int]:
    name = str(metadata.get("general.name", "")).lower()
    if not any(part in name for part in _STRIPPING_NAMES):
        return set()
    ids = set(vocabulary.special | vocabulary.user_defined)
    if "</s>" in vocabulary.ids:
        ids.add(vocabulary.ids["</s>"])
    return ids - {vocabulary.ids.get(text, -1) for text in _NOT_STRIPPING}
