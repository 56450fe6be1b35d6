"""Which bytes a token of a `tokenizer.json` adds to a text.

Most decoders work token by token. Theirs are read here, so that text can be produced one token at
a time; bytes that form no character become U+FFFD in the way UTF-8 decoders agree on, whereas the
`tokenizers` library makes every byte of a run of byte tokens U+FFFD if one of them is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from kvern.text.bpe import byte_level_bytes, byte_token_value


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a token becomes bytes.

    Attributes:
        byte_level: tokens are written in GPT-2's stand-in characters.
        byte_fallback: `<0x0A>` is a byte.
        replacements: texts to replace, in order.
        at_start: what happens to the first token of a text: nothing, one leading space goes, or
            every mark of a space goes.
        mark: the mark of a space.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    at_start: Literal["keep", "strip_space", "drop_marks"] = "keep"
    mark: str = "\u2581"

    def token_bytes(self, token: str, first: bool) -> bytes:
        """The bytes of a token."""
        if first and self.at_start == "drop_marks":
            token = token.replace(self.mark, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback:
            value = byte_token_value(token)
            if value is not None:
                return bytes([value])
        if first and self.at_start == "strip_space":
            token = token.removeprefix(" ")
        return byte_level_bytes(token) if self.byte_level else token.encode()


def piece_rule(decoder: Any) -> PieceRule | None:
    """The rule of a decoder of the `tokenizers` library, or None if it needs the whole text."""
    if decoder is None:
        return None
    try:
        description = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    kind = description.get("type")
    if kind == "ByteLevel":
        return PieceRule(byte_level=True)
    if kind == "Metaspace":
        return _metaspace_rule(description)
    if kind == "Sequence":
        return _sequence_rule(description.get("decoders", []))
    return None


def _metaspace_rule(description: dict[str, Any]) -> PieceRule:
    mark = description.get("replacement", "\u2581")
    keeps = description.get("prepend_scheme") == "never"
    return PieceRule(
        replacements=((mark, " "),), at_start="keep" if keeps else "drop_marks", mark=mark
    )


def _sequence_rule(decoders: list[dict[str, Any]]) -> PieceRule | None:
    """Replacements, byte fallback, fusing and the strip of one leading space, in this order."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = byte_level = fused = False
    at_start: Literal["keep", "strip_space"] = "keep"
    for step in decoders:
        kind = step.get("type")
        if kind == "Replace" and not (byte_fallback or fused or byte_level):
            old = step.get("pattern", {}).get("String")
            if old is None:
                return None
            replacements.append((old, step.get("content", "")))
        elif kind == "ByteFallback" and not (fused or byte_level):
            byte_fallback = True
        elif kind == "ByteLevel" and not (fused or byte_fallback):
            byte_level = fused = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
            if step.get("start", 0) > 1 or at_start == "strip_space":
                return None
            at_start = "strip_space" if step.get("start") else at_start
        else:
            return None
    return PieceRule(byte_level, byte_fallback, tuple(replacements), at_start)
