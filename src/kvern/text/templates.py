"""Where a model keeps its chat templates, and which one a request uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvern.errors import FileFormatError, InputError

_GGUF_KEY: Final = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """A model's chat templates by name; the usual one is called `default`."""

    by_name: Mapping[str, str] = field(default_factory=dict)

    @property
    def default(self) -> str | None:
        """The source of the usual template."""
        return self.by_name.get("default")

    def choose(self, wanted: str | None, *, has_tools: bool) -> str | None:
        """The source to use: the named one, the given source itself, or the model's choice.

        Raises:
            InputError: `wanted` is neither a known name nor the source of a template.
        """
        if wanted is None:
            if has_tools and "tool_use" in self.by_name:
                return self.by_name["tool_use"]
            return self.default
        if wanted in self.by_name:
            return self.by_name[wanted]
        if "{" not in wanted:
            names = ", ".join(self.by_name) or "none"
            raise InputError(f"the model has no chat template {wanted!r}: it has {names}")
        return wanted


def templates_of_gguf(metadata: Mapping[str, Any]) -> TemplateSet:
    """The templates of a GGUF file: the default and those under `tokenizer.chat_template.NAME`.

    Raises:
        FileFormatError: a template is not a string.
    """
    found: dict[str, str] = {}
    for key, value in metadata.items() if _GGUF_KEY in metadata else ():
        name = "default" if key == _GGUF_KEY else key.removeprefix(f"{_GGUF_KEY}.")
        if name == key or not name:
            continue
        if not isinstance(value, str):
            raise FileFormatError(f"{key} is {type(value).__name__}, and must be a string")
        found[name] = value
    return TemplateSet(found)


def templates_of_config(value: Any, where: str) -> dict[str, str]:
    """The templates of a `tokenizer_config.json` entry: a source, or a list of named ones.

    Raises:
        FileFormatError: the entry has another shape.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in value}
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"{where}: a chat template lacks its name or text") from error
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    raise FileFormatError(f"{where}: chat_template is {type(value).__name__}, and must be a string")
