"""The tokenizer of a Hugging Face folder, on the `tokenizers` library.

`tokenizer.json` describes the algorithm, and what surrounds a text: `add_bos_token` of the
configuration does not count beside it. The files around it add what transformers reads from them:
named special tokens (`tokenizer_config.json`, `special_tokens_map.json`), the ids that end a
generation (`generation_config.json`, `config.json`) and chat templates.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvern.errors import FileFormatError, ModelError
from kvern.text.backend import SpecialIds
from kvern.text.pieces import PieceRule, piece_rule
from kvern.text.templates import TemplateSet, templates_of_config

_NAMED: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """What lies in a folder.

    Attributes:
        tokenizer_file: the `tokenizer.json`.
        config: `tokenizer_config.json`, completed by `special_tokens_map.json`.
        end_ids: ids that end a generation, as the model's configuration says.
        templates: chat templates.
    """

    tokenizer_file: Path
    config: Mapping[str, Any]
    end_ids: frozenset[int]
    templates: TemplateSet


def read_folder(path: str | os.PathLike[str]) -> TokenizerFolder:
    """Finds and reads the tokenizer's files.

    Raises:
        ModelError: there is no `tokenizer.json`.
        FileFormatError: a file beside it is not JSON of the right shape.
    """
    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise ModelError(_what_is_missing(given))
    folder = file.parent
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as older files say it
        config |= _read_json(folder / "special_tokens_map.json")
    return TokenizerFolder(file, config, _end_ids(folder), _templates(folder, config))


def _what_is_missing(given: Path) -> str:
    if not given.exists():
        return f"there is no file or folder {given}"
    if (given / "tokenizer.model").is_file():
        return (
            f"{given} holds a SentencePiece tokenizer.model but no tokenizer.json: convert it once "
            "with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    return f"{given} holds no tokenizer: tokenizer.json is missing"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileFormatError(f"{path} holds {type(value).__name__}, and must hold an object")
    return value


def _end_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if isinstance(value, int):
            return frozenset((value,))
        if isinstance(value, list) and value:
            return frozenset(int(token_id) for token_id in value)
    return frozenset()


def _templates(folder: Path, config: Mapping[str, Any]) -> TemplateSet:
    found = templates_of_config(config.get("chat_template"), str(folder / "tokenizer_config.json"))
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{file.stem: file for file in others}}
    written = {name: f.read_text(encoding="utf-8") for name, f in files.items() if f.is_file()}
    return TemplateSet(written or found)


class HuggingFaceBackend:
    """A tokenizer read from `tokenizer.json`.

    Raises:
        FileFormatError: the file is damaged, or a special token has no id.
    """

    def __init__(self, folder: TokenizerFolder) -> None:
        self._tokenizer = _load(folder.tokenizer_file)
        _add_configured_tokens(self._tokenizer, folder.config)
        self._special = _special_ids(self._tokenizer, folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._rule: PieceRule | None = piece_rule(self._tokenizer.decoder)
        self._plain: Tokenizer | None = None
        self._lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def special(self) -> SpecialIds:
        """The named special tokens."""
        return self._special

    @property
    def has_token_bytes(self) -> bool:
        """Whether the file's decoder works token by token."""
        return self._rule is not None

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._tokenizer if parse_special else self._plain_tokenizer()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and parse_special:
            bos_id, eos_id = self._special.bos_id, self._special.eos_id
            if self._special.add_bos and ids[:2] == [bos_id, bos_id]:
                del ids[0]
            if self._special.add_eos and ids[-2:] == [eos_id, eos_id]:
                del ids[-1]
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether the file marks a token as special."""
        return token_id in self._special_token_ids

    def token_bytes(self, token_id: int, *, first: bool) -> bytes:
        """What a token adds to a text; nothing for an id outside the vocabulary."""
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        return token.encode() if self._rule is None else self._rule.token_bytes(token, first)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some tokens."""
        if self._rule is None:
            known = [i for i in token_ids if i >= 0]
            text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
            return text
        kept = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        pieces = (self.token_bytes(i, first=n == 0) for n, i in enumerate(kept))
        return b"".join(pieces).decode(errors="replace")

    def _plain_tokenizer(self) -> Tokenizer:
        """A copy that reads special tokens as plain text, made when it is first wanted."""
        with self._lock:
            if self._plain is None:
                plain = Tokenizer.from_str(self._tokenizer.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain


def _load(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise FileFormatError(f"{path} is not a valid tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _content(token: Any) -> str | None:
    if isinstance(token, str):
        return token
    if isinstance(token, dict) and isinstance(token.get("content"), str):
        return str(token["content"])
    return None


def _add_configured_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens that the configuration names, as transformers does."""
    declared = config.get("added_tokens_decoder") or {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _content(entry)
        if text and text not in known:
            flags = {
                name: bool(entry[name])
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                if isinstance(entry, dict) and name in entry
            }
            tokenizer.add_tokens([AddedToken(text, **flags)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra)
    named = [config.get(name) for name in _NAMED]
    texts = [text for text in map(_content, [*named, *extra]) if text]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(texts)]
    )


def _special_ids(tokenizer: Tokenizer, folder: TokenizerFolder) -> SpecialIds:
    texts = {name: text for name in _NAMED if (text := _content(folder.config.get(name)))}
    ids = {name: tokenizer.token_to_id(text) for name, text in texts.items()}
    bos_id, eos_id = ids.get("bos_token"), ids.get("eos_token")
    end_ids = set(folder.end_ids)
    if eos_id is not None:
        end_ids.add(eos_id)
    add_bos, add_eos = _added_around_text(tokenizer, bos_id, eos_id)
    return SpecialIds(
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=frozenset(end_ids),
        add_bos=add_bos,
        add_eos=add_eos,
        texts=texts,
    )


def _added_around_text(
    tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None
) -> tuple[bool, bool]:
    """Whether BOS stands before and EOS behind a text that is encoded with special tokens."""
    alone = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(framed)) if framed[i : i + len(alone)] == alone), 0)
    return bos_id in framed[:start], eos_id in framed[start + len(alone) :]
