"""Typed access to a configuration: what is missing or absurd is named, nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvern.errors import ModelError

MAX_LAYERS = 10_000


class MissingFieldError(ModelError):
    """The configuration lacks a field that the question needs.

    Attributes:
        field: the field's name in this family's configurations.
    """

    def __init__(self, source: str, field: str) -> None:
        super().__init__(
            f"{source}: the configuration lacks {field}, without which its cache is not known; "
            f"add the field or give the complete config.json"
        )
        self.field = field


class Config:
    """One text model's configuration in `config.json` form.

    Fields with several spellings are asked for by all of them, the usual one first; a field that
    is null counts as absent.
    """

    __slots__ = ("source", "unknown", "values")

    def __init__(
        self, values: Mapping[str, Any], source: str, unknown: frozenset[str] = frozenset()
    ) -> None:
        self.values = values
        self.source = source
        self.unknown = unknown

    def without(self, unknown: frozenset[str]) -> Config:
        """The same fields, some of which nothing may be concluded from: asking for one fails."""
        return Config(self.values, self.source, unknown)

    def get(self, *names: str) -> Any:
        """The first field that is present, or None.

        Raises:
            MissingFieldError: a field that counts as unknown.
        """
        for name in names:
            if name in self.unknown:
                raise MissingFieldError(self.source, name)
            value = self.values.get(name)
            if value is not None:
                return value
        return None

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`.

        Raises:
            MissingFieldError: no spelling is present and there is no default.
            ModelError: the value is no such number.
        """
        value = self.get(*names)
        if value is None:
            if default is None:
                raise MissingFieldError(self.source, names[0])
            return default
        if type(value) is not int or not minimum <= value < 2**40:
            self.refuse(f"{names[0]} is {value!r}: a whole number from {minimum} up is needed")
        return int(value)

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        """A whole number, or None where the configuration does not state it."""
        if self.get(*names) is None:
            return None
        return self.integer(*names, minimum=minimum)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean field."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{name} is {value!r}: true or false is needed")
        return bool(value)

    def text(self, *names: str) -> str | None:
        """A string field, or None."""
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{names[0]} is {value!r}: a string is needed")
        return value

    def table(self, *names: str) -> Config:
        """A nested table; an absent one is empty."""
        value = self.get(*names)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.refuse(f"{names[0]} is {value!r}: a table is needed")
        return Config(value, self.source)

    def integers(self, name: str, length: int | None = None) -> tuple[int, ...] | None:
        """A list of whole numbers, or None; refuses a wrong length."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or not all(type(item) is int for item in value):
            self.refuse(f"{name} must be a list of whole numbers")
        self._check_length(name, value, length)
        return tuple(value)

    def strings(self, name: str, length: int | None = None) -> tuple[str, ...] | None:
        """A list of strings, or None; refuses a wrong length."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            self.refuse(f"{name} must be a list of strings")
        if not all(isinstance(item, str) for item in value):
            self.refuse(f"{name} must be a list of strings")
        self._check_length(name, value, length)
        return tuple(value)

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error for a field whose value cannot be meant.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"{self.source}: {reason}")

    @property
    def num_layers(self) -> int:
        """Decoder layers, multi-token-prediction layers not counted."""
        number = self.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if number > MAX_LAYERS:
            self.refuse(f"num_hidden_layers is {number:,}: more than {MAX_LAYERS:,} are absurd")
        return number

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.integer("hidden_size", "n_embd", "d_model")

    @property
    def num_heads(self) -> int:
        """Query heads per attention layer."""
        return self.integer("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads per attention layer; absent means one per query head."""
        value = self.optional_integer("num_key_value_heads", "num_kv_heads")
        return self.num_heads if value is None else value

    @property
    def head_dim(self) -> int:
        """Elements per head; absent means the hidden size shared out over the heads."""
        value = self.optional_integer("head_dim")
        if value is not None:
            return value
        hidden_size, num_heads = self.hidden_size, self.num_heads
        if hidden_size % num_heads:
            self.refuse(
                f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, "
                f"and head_dim is absent"
            )
        return hidden_size // num_heads

    def _check_length(self, name: str, value: Sequence[Any], length: int | None) -> None:
        if length is not None and len(value) != length:
            self.refuse(f"{name} has {len(value)} entries for {length} layers")
