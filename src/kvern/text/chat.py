"""Chat templates: a model's own Jinja text that turns messages into a prompt.

Templates come with model files and are not trusted: they run in Jinja's immutable sandbox, see
plain JSON values only, and get the helpers that Hugging Face's templates expect
(`raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, the `generation` block).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvern.errors import InputError, ModelError

Clock = Callable[[], datetime]
_PROBE: Final = "kvern-probe"
# The space behind the mark tells whether the template trims its messages.
_CONTINUATION_MARK: Final = "kvern-continues-here "


class _TemplateRefusalError(TemplateError):
    """The template itself called raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an answer for training: kept as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("render_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> str:
        """The text inside the block."""
        return caller()


class _GuardedNamespace(Namespace):
    """A namespace that refuses attributes with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that Jinja's own filter would add."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise _TemplateRefusalError(message)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        special_texts: values of `bos_token`, `eos_token` and so on.
        clock: what `strftime_now` reads; the wall clock is the caller's choice.

    Raises:
        ModelError: the text is not valid Jinja.
    """

    def __init__(
        self, source: str, special_texts: Mapping[str, str], clock: Clock = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        environment.globals["namespace"] = _GuardedNamespace
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template is not valid Jinja (line {error.lineno}: "
                f"{error.message}); use the model without it (--raw)"
            ) from error
        self._special_texts = dict(special_texts)
        self._wants_parts: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for some messages.

        Content may be a string, None, missing, or a list of text parts, which is joined unless the
        template only understands parts.

        Args:
            messages: mappings with a `role`.
            add_generation_prompt: end with the header of the next answer.
            continue_final_message: end inside the last message, so that the model continues it.
            variables: anything else the template knows (`tools`, `documents`, ...).

        Raises:
            InputError: no messages, a message of a wrong shape, or the template refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InputError(
                "continue_final_message and add_generation_prompt exclude each other: the first "
                "stays inside the last message, the second opens a new one"
            )
        plain = _plain_messages(messages)
        values = {name: _plain(value) for name, value in variables.items()}
        values.setdefault("tools", None)
        values.setdefault("documents", None)
        if continue_final_message:
            plain[-1] = _marked(plain[-1])
        text = self._render_some_way(plain, add_generation_prompt, values)
        if continue_final_message:
            return _cut_at_mark(text)
        return text

    def _render_some_way(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, values: dict[str, Any]
    ) -> str:
        """Tries the forms of absent content in turn: missing, null, empty.

        Templates disagree about it: most take a missing or empty one, some read a null as the
        sign of a tool call. As in Hugging Face's, null is missing as long as that renders.
        """
        forms = (_without_content, _with_null_beside_tool_calls, _with_empty_content)
        has_gap = any(message.get("content") is None for message in messages)
        for form in forms[: None if has_gap else 1]:
            prepared = [form(self._in_wanted_shape(message)) for message in messages]
            try:
                return self._render(prepared, add_generation_prompt, values)
            except _TemplateRefusalError as error:
                raise InputError(f"the chat template refuses the messages: {error}") from error
            except (UndefinedError, TypeError) as error:
                failure: Exception = error
            except Exception as error:  # whatever an arbitrary template can run into
                raise _template_failure(error) from error
        raise _template_failure(failure) from failure

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        return self._template.render(
            {
                **self._special_texts,
                **values,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _in_wanted_shape(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if content is None or not (self._needs_parts() or isinstance(content, list)):
            return message
        text = _joined(content)
        if self._needs_parts():
            return {**message, "content": [{"type": "text", "text": text}]}
        return {**message, "content": text}

    def _needs_parts(self) -> bool:
        """Whether the template shows a list of parts, but not a string (found out by trying)."""
        if self._wants_parts is None:
            parts = [{"type": "text", "text": _PROBE}]
            self._wants_parts = not self._shows(_PROBE) and self._shows(parts)
        return self._wants_parts

    def _shows(self, content: Any) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}], False, {"tools": None})
        except Exception:  # a template may refuse a lone user message
            return False
        return _PROBE in text


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise InputError("the list of messages is empty: give at least one message")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}] must be an object with a text as its role")
        content = message.get("content")
        if not isinstance(content, (str, list, tuple, type(None))):
            raise InputError(
                f"messages[{index}].content is {type(content).__name__}: "
                "it must be a text, a list of text parts, or null"
            )
        if isinstance(content, (list, tuple)):
            _check_parts(content, index)
        plain.append({str(k): _plain(v) for k, v in message.items() if v is not None})
    return plain


def _check_parts(parts: Sequence[Any], index: int) -> None:
    for number, part in enumerate(parts):
        if isinstance(part, str):
            continue
        where = f"messages[{index}].content[{number}]"
        if not isinstance(part, Mapping):
            raise InputError(f"{where} must be an object such as {{'type': 'text', 'text': ...}}")
        if part.get("type", "text") not in ("text", "input_text", "output_text"):
            raise InputError(f"{where} is of type {part['type']!r}: only text is understood")
        if not isinstance(part.get("text"), str):
            raise InputError(f"{where} has no text")


def _joined(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _plain(value: Any) -> Any:
    """The value rebuilt from JSON types, so that a template meets no method it could misuse."""
    if isinstance(value, bool) or value is None:
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise InputError(f"a value of type {type(value).__name__} cannot be given to a chat template")


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _with_null_beside_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "content" in message:
        return message
    return {**message, "content": None if message.get("tool_calls") else ""}


def _with_empty_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message.get("content", "")}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        raise InputError("the final message has no content to continue")
    return {**message, "content": _joined(content) + _CONTINUATION_MARK}


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUATION_MARK.strip())
    if position < 0:
        raise InputError("the chat template does not show the final message, so it cannot go on")
    before = text[:position]
    return before if text.startswith(_CONTINUATION_MARK, position) else before.rstrip()


def _template_failure(error: Exception) -> InputError:
    kind = "an undefined value" if isinstance(error, UndefinedError) else type(error).__name__
    return InputError(f"the chat template failed on these messages ({kind}): {error}")
