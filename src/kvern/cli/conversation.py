r"""A conversation as token ids that only ever grow, so that the cache can serve its whole past.

Rendering the whole history anew at each turn can give other ids than the model produced: text does
not always tokenise the way it was generated. So the ids that went in and came out are kept, and
only what the template adds after the last answer is tokenised:

    ids kept:   [ prompt of turn 1 | answer 1 ]
    turn 2:     [ prompt of turn 1 | answer 1 | "<|im_end|>\n<|im_start|>user\n...assistant\n" ]

If a template rewrites its past (drops earlier reasoning, say), the history is rendered anew, and
the cache serves what is still equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """What a conversation needs from a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The chat template's text for messages."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The chat template's token ids for messages."""
        ...


class Conversation:
    """Messages so far, and the token ids they really were."""

    def __init__(self, tokenizer: ChatTokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages: list[dict[str, Any]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._ids: list[int] = []
        self._text = ""

    def ask(self, question: str) -> list[int]:
        """The prompt for the next turn; nothing is kept until `keep`."""
        messages = [*self._messages, {"role": "user", "content": question}]
        if self._ids:
            rendered = self._tokenizer.render_chat(messages, add_generation_prompt=True)
            if rendered.startswith(self._text):
                added = rendered[len(self._text) :]
                return self._ids + self._tokenizer.encode(added, add_special_tokens=False)
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def keep(
        self, question: str, prompt_ids: list[int], answer_ids: list[int], answer: str
    ) -> None:
        """Remembers a turn: the ids that went in and came out, and the answer's text."""
        self._messages.append({"role": "user", "content": question})
        prompt_text = self._tokenizer.render_chat(self._messages, add_generation_prompt=True)
        self._messages.append({"role": "assistant", "content": answer})
        self._ids = prompt_ids + answer_ids
        self._text = prompt_text + self._tokenizer.decode(answer_ids, skip_special_tokens=False)
