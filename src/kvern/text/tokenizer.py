"""The tokenizer of a model: text to token ids and back, and chats to prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvern.errors import InputError, ModelError
from kvern.text.backend import Backend
from kvern.text.gguf import GGUFBackend
from kvern.text.huggingface import HuggingFaceBackend, read_folder
from kvern.text.templates import TemplateSet, templates_of_gguf

if TYPE_CHECKING:
    from kvern.text.chat import ChatTemplate, Clock


class Tokenizer:
    """Text to token ids and back.

    Build one with `from_file` or `from_gguf`. Encoding is thread-safe.
    """

    def __init__(self, backend: Backend, templates: TemplateSet, clock: Clock | None) -> None:
        self._backend = backend
        self._templates = templates
        self._clock = clock or datetime.now
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, clock: Clock | None = None) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, or of a `tokenizer.json` and its neighbours.

        Token ids equal those of transformers with the same files, except that BOS is not added in
        front of a text that begins with BOS.

        Args:
            path: folder or file.
            clock: what chat templates read as now; the wall clock where not given.

        Raises:
            ModelError: there is no tokenizer, or its files are damaged.
        """
        folder = read_folder(path)
        return cls(HuggingFaceBackend(folder), folder.templates, clock)

    @classmethod
    def from_gguf(cls, header: Any, *, clock: Clock | None = None) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata describes (see `kvern.text.gguf`).

        Args:
            header: the file's header (anything with `metadata`), or the metadata mapping itself.
            clock: what chat templates read as now; the wall clock where not given.

        Raises:
            FileFormatError: the metadata is incomplete or contradicts itself.
            UnsupportedModelError: the tokenizer's model or pre-tokenizer is unknown.
        """
        metadata: Mapping[str, Any] = getattr(header, "metadata", header)
        return cls(GGUFBackend(metadata), templates_of_gguf(metadata), clock)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.vocab_size

    @property
    def bos_id(self) -> int | None:
        """Begin of sequence, None where the model has none."""
        return self._backend.special.bos_id

    @property
    def eos_id(self) -> int | None:
        """End of sequence, None where the model has none."""
        return self._backend.special.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a generation: end of sequence, of turn, of message."""
        return self._backend.special.end_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts BOS first by default."""
        return self._backend.special.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether `encode` puts EOS last by default."""
        return self._backend.special.add_eos

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, None where the model has none."""
        return self._templates.default

    @property
    def has_token_bytes(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""
        return self._backend.has_token_bytes

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: put BOS first and EOS last where the model wants them. A text that
                already begins with BOS keeps the one it has; none is ever removed.
            parse_special: read the text of a special token (`<|im_end|>`) as that token; otherwise
                it is plain text. Tokens that are added but not special are always found.

        Raises:
            InputError: the text holds a lone surrogate.
        """
        _refuse_surrogates(text)
        return self._backend.encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens; U+FFFD where their bytes form no character.

        Ids outside the vocabulary, which a model's padded output layer can produce, have no text.
        """
        ids = [int(token_id) for token_id in token_ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of an answer's text."""
        return self._backend.is_special(int(token_id))

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """The bytes that a token adds to a text, special tokens included.

        Args:
            token_id: any id; one outside the vocabulary adds nothing.
            first: no other token of the text stands before it (its leading space may go).
        """
        return self._backend.token_bytes(int(token_id), first=first)

    def token_text(self, token_id: int) -> str:
        r"""A token for display: its text, with bytes that are no whole character as `\xNN`."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for some messages, as text.

        Args:
            messages: mappings with `role` and `content` (a text, text parts, or null).
            add_generation_prompt: end with the header of the next answer.
            chat_template: name of one of the model's templates, or the source of another; by
                default the model's `tool_use` template if there are tools and it has one.
            continue_final_message: end inside the last message, so that the model continues it.
            variables: whatever else the template knows (`tools`, `documents`, ...).

        Raises:
            ModelError: the model has no chat template, or it is not valid Jinja.
            InputError: the messages are malformed, or the template refuses them.
        """
        source = self._templates.choose(chat_template, has_tools=bool(variables.get("tools")))
        if source is None:
            raise ModelError("the model has no chat template: give the prompt as raw text (--raw)")
        return self._compile(source).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """The prompt for some messages, as token ids; arguments and errors as `render_chat`.

        BOS is there exactly if the template writes it, as in transformers.
        """
        text = self.render_chat(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False)

    def _compile(self, source: str) -> ChatTemplate:
        compiled = self._compiled.get(source)
        if compiled is None:
            # Jinja costs more than a third of the import of this package: only chats pay for it.
            from kvern.text.chat import ChatTemplate

            compiled = ChatTemplate(source, self._backend.special.texts, self._clock)
            self._compiled[source] = compiled
        return compiled


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
            f"{error.start}), which is no Unicode character: remove it"
        ) from error
