"""Small SentencePiece models, and their contents as GGUF metadata."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import sentencepiece
from tests.text.texts import TEXTS

_WORDS = ["hello", "world", "token", "cache", "value", "key", "of", "the", "a", "is", "12", "3"]


def _corpus() -> list[str]:
    words = random.Random(1)
    lines = [line for text in TEXTS for line in text.replace("\r", "\n").split("\n")]
    lines = [line.replace("\x00", "") for line in lines if line.strip()] * 3
    lines += [" ".join(words.choices(_WORDS, k=8)) for _ in range(300)]
    lines += [f"the quick brown fox number {n} jumps over lazy dogs in town" for n in range(300)]
    return lines


@cache
def train(**options: Any) -> bytes:
    """Trains a model on the test texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_corpus()),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece itself."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def metadata(model: bytes, kind: str) -> dict[str, Any]:
    """What a GGUF file would say of the model; `kind` is `llama` or `t5`."""
    inside = processor(model)
    ids = range(inside.get_piece_size())
    named = {
        "bos": inside.bos_id(),
        "eos": inside.eos_id(),
        "unknown": inside.unk_id(),
        "padding": inside.pad_id(),
    }
    normalizer = dict(_fields(_first(model, 3)))
    entries: dict[str, Any] = {
        "model": kind,
        "tokens": [inside.id_to_piece(i) for i in ids],
        "scores": [inside.get_score(i) for i in ids],
        "token_type": list(_piece_types(model)),
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        **{f"{name}_token_id": value for name, value in named.items() if value >= 0},
    }
    if normalizer.get(2):
        entries["precompiled_charsmap"] = list(normalizer[2])
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def _piece_types(model: bytes) -> Iterator[int]:
    for field, value in _fields(model):
        if field == 1:
            yield dict(_fields(value)).get(3, 1)


def _first(message: bytes, wanted: int) -> bytes:
    return next(value for field, value in _fields(message) if field == wanted)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protocol buffer message."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        field, wire = divmod(varint(), 8)
        if wire == 0:
            yield field, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        size = varint() if size is None else size
        value = message[position : position + size]
        position += size
        yield field, struct.unpack("<f", value)[0] if wire == 5 else value
