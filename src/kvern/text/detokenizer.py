"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from kvern.text.tokenizer import Tokenizer

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4


class Detokenizer:
    """Turns generated tokens into pieces of text.

    A character whose bytes are spread over several tokens is held back until it is complete. The
    pieces together are what `Tokenizer.decode` makes of the same tokens behind the same prompt,
    with U+FFFD only where bytes form no character.

    Args:
        tokenizer: the model's.
        prompt_ids: the tokens before the first generated one. Behind some text a first word keeps
            its leading space, and a character that the prompt began is completed.
        skip_special_tokens: leave out control tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._whole = None if tokenizer.has_token_bytes else _WholeText(tokenizer, prompt_ids, self)
        self._decoder = _UTF8_DECODER(errors="replace")
        self._is_first = True
        tail: list[bytes] = []
        for token_id in reversed(prompt_ids):
            if self._is_left_out(token_id):
                continue
            self._is_first = False
            tail.append(tokenizer.token_bytes(token_id))
            if sum(map(len, tail)) >= _LONGEST_CHARACTER:
                break
        self._decoder.decode(b"".join(reversed(tail)))

    @property
    def skips_special_tokens(self) -> bool:
        """Whether control tokens are left out."""
        return self._skip

    def push(self, token_id: int) -> str:
        """The text that a token completes; often empty, never a broken character."""
        if self._whole is not None:
            return self._whole.push(token_id)
        if self._is_left_out(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id, first=self._is_first)
        self._is_first = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left once no token follows: U+FFFD for a character that was cut off."""
        if self._whole is not None:
            return self._whole.finish()
        return self._decoder.decode(b"", final=True)

    def _is_left_out(self, token_id: int) -> bool:
        return self._skip and self._tokenizer.is_special(token_id)


class _WholeText:
    """For tokenizers whose tokens have no bytes of their own: decodes everything every time."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], owner: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._skip = owner.skips_special_tokens
        self._ids = list(prompt_ids)
        self._shown = self._text() if self._ids else ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(self._text().rstrip("\ufffd"))

    def finish(self) -> str:
        return self._advance(self._text())

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        delta = text[len(self._shown) :]
        self._shown = text
        return delta

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
