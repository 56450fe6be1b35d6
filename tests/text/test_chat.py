"""Chat templates: what Hugging Face's render, and what it takes to be robust."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.text.golden import byte_level_metadata
from tests.text.hf_folders import write_folder

from kvern.errors import InputError, ModelError
from kvern.spec.gguf import read_header
from kvern.text import Tokenizer
from kvern.text.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
NULL_MEANS_CALL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}"
    "CALL {{ m['tool_calls'][0]['function']['name'] }};"
    "{% else %}{{ m.role + ':' + m['content'] }};{% endif %}{% endfor %}"
)
CONTENT_IF_ANY = (
    "{% for m in messages %}{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %};"
    "{% endfor %}"
)
EVERYTHING = """{{- bos_token }}
{%- set ns = namespace(count=0, first=true) %}
{%- if tools %}
    {{- '<tools>' + (tools | tojson(indent=2)) + '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '[' ~ ns.count ~ ' ' ~ message.role | upper ~ ']' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{% endfor %}
{%- if not (messages | selectattr('role', 'equalto', 'user') | list) %}
    {{- raise_exception('a user message is needed') }}
{%- endif %}
{%- if add_generation_prompt %}{{ '[GO]' }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Sé breve <b>&</b>"},
    {"role": "skip", "content": "no"},
    {"role": "user", "content": " 2 + 2 = ? "},
    {"role": "assistant", "content": "  4\n"},
    {"role": "user", "content": "sure?"},
    {"role": "stop", "content": "no"},
    {"role": "user", "content": "never"},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"x": [1, None, True]}}}]
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **options)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_smollm2(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_header(smollm2_path))
    text = tokenizer.render_chat(user("What is a cache?"))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is a cache?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(user("What is a cache?"))
    assert ids == tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id  # this model's BOS opens every message
    assert ids.count(2) == 2


def test_double_bos_of_a_gguf_file() -> None:  # TOK-003
    for add_bos in (False, True):
        for source, count in (("<|im_start|>", 2), ("", 1)):
            metadata = {
                **byte_level_metadata("llama-bpe"),
                "tokenizer.ggml.add_bos_token": add_bos,
                "tokenizer.chat_template": source + "<|im_start|>user\n{{ messages[0].content }}",
            }
            tokenizer = Tokenizer.from_gguf(metadata)
            ids = tokenizer.apply_chat_template(user("hi"))
            assert ids.count(1) == count  # exactly those that the template writes
            text = tokenizer.render_chat(user("hi"))
            assert tokenizer.encode(text) == ids  # and encoding the text adds none either


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("source", [EVERYTHING, CHATML, CONTENT_IF_ANY])
def test_renders_like_transformers(tmp_path: Path, source: str, tools: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, "llama2", chat_template=source)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = Tokenizer.from_file(folder)
    for add in (False, True):
        options = {"add_generation_prompt": add, "tools": tools, "enable_thinking": False}
        expected = oracle.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert tokenizer.render_chat(MESSAGES, **options) == expected
        expected = oracle.apply_chat_template(MESSAGES, **options)["input_ids"]
        assert tokenizer.apply_chat_template(MESSAGES, **options) == expected
    prefill = [*MESSAGES[:3], {"role": "assistant", "content": "It is  "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = oracle.apply_chat_template(prefill, tokenize=False, **options)
    assert tokenizer.render_chat(prefill, **options) == expected


def test_the_clock_is_injected() -> None:
    def clock() -> datetime:
        return datetime(2031, 5, 7, 8, 9)

    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert template(source, clock=clock).render(user("x")) == "07 May 2031 08:09"
    metadata = {**byte_level_metadata("smollm"), "tokenizer.chat_template": source}
    assert Tokenizer.from_gguf(metadata, clock=clock).render_chat(user("x")) == "07 May 2031 08:09"


@pytest.mark.parametrize(  # SRV-009
    "content",
    [
        [{"type": "text", "text": "one two"}],
        [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}],
        ["one", " two"],
        [{"text": "one two"}],
        [{"type": "input_text", "text": "one two"}],
        ("one two",),
    ],
)
@pytest.mark.parametrize("source", [CHATML, PARTS_ONLY, CONTENT_IF_ANY])
def test_parts_are_the_joined_text(content: Any, source: str) -> None:
    compiled = template(source)
    assert compiled.render(user(content)) == compiled.render(user("one two"))
    assert "one two" in compiled.render(user("one two"))


@pytest.mark.parametrize("source", [CHATML, PARTS_ONLY, CONTENT_IF_ANY, NULL_MEANS_CALL])
@pytest.mark.parametrize("gap", [{"content": ""}, {"content": None}, {}, {"content": []}])
def test_absent_content_is_empty(source: str, gap: dict[str, Any]) -> None:  # SRV-009
    compiled = template(source)
    messages = [{"role": "system", **gap}, *user("x"), {"role": "user", **gap}]
    text = compiled.render(messages)
    assert "None" not in text
    empty = [{"role": "system", "content": ""}, *user("x"), {"role": "user", "content": ""}]
    assert text == compiled.render(empty)


@pytest.mark.parametrize("gap", [{"content": None}, {}])
def test_tool_calls_without_content(gap: dict[str, Any]) -> None:  # SRV-009
    messages = [*user("x"), {"role": "assistant", **gap, "tool_calls": CALL}]
    assert template(NULL_MEANS_CALL).render(messages) == "user:x;CALL f;"
    shown = template(CONTENT_IF_ANY).render(messages)
    assert shown == 'user:x;assistant:<call>{"name": "f", "arguments": {"x": 1}}</call>;'
    assert template(CHATML).render(messages).count("<|im_start|>") == 3


def test_other_fields_and_roles_pass_through() -> None:  # SRV-009
    source = "{% for m in messages %}{{ m.role }}({{ m.name }}){{ m.content }};{% endfor %}"
    messages = [
        {"role": "developer", "content": "d", "name": "n", "extra": {"deep": [1]}},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert template(source).render(messages) == "developer(n)d;tool()t;"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "list of messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a text as its role"),
        (user(5), r"messages\[0\]\.content is int"),
        (user([{"type": "image_url", "image_url": {}}]), r"content\[0\] is of type 'image_url'"),
        (user([{"type": "text"}]), r"content\[0\] has no text"),
        (user([5]), r"content\[0\] must be an object"),
        ([{"role": "user", "content": "x", "bad": object()}], "type object cannot be given"),
        ([{"role": "system", "content": "x"}], "refuses the messages: a user message is needed"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        template(EVERYTHING).render(messages)


def test_invalid_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"not valid Jinja \(line 2: "):
        template("ok\n{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__ }}{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ namespace(a=1).update }}{{ ns.x.y }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 / 0 }}",
        "{{ unknown.field }}",
        "{{ 'a' + 1 }}",
        "{% include 'x' %}",
    ],
)
def test_misbehaving_templates_end_in_one_error(source: str) -> None:
    with pytest.raises(InputError, match="the chat template failed on these messages"):
        template(source).render(user("x"))


def test_dunder_attributes_show_nothing() -> None:
    assert template("[{{ messages.__class__ }}]").render(user("x")) == "[]"


def test_templates_cannot_change_what_they_are_given() -> None:
    messages = [{"role": "user", "content": "x", "list": [1, {"a": 2}]}]
    before = json.dumps(messages)
    source = "{% for m in messages %}{% set _ = m.update({'content': 'y'}) %}{% endfor %}"
    with pytest.raises(InputError):
        template(source).render(messages)
    assert json.dumps(messages) == before


def test_continuing_the_final_message() -> None:
    messages = [*user("2 + 2"), {"role": "assistant", "content": "It is"}]
    compiled = template(CHATML)
    shown = compiled.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert shown.endswith("<|im_start|>assistant\nIt is")
    with pytest.raises(InputError, match="exclude each other"):
        compiled.render(messages, continue_final_message=True)
    with pytest.raises(InputError, match="no content to continue"):
        compiled.render(
            [{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(InputError, match="does not show the final message"):
        template("x").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_named_templates_of_a_gguf_file() -> None:
    metadata = {
        **byte_level_metadata("smollm"),
        "tokenizer.chat_template": "D",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.render_chat(user("x")) == "D"
    assert tokenizer.render_chat(user("x"), tools=TOOLS) == "T"
    assert tokenizer.chat_template == "D"


def test_model_without_a_template() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("smollm"))
    assert tokenizer.chat_template is None
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.apply_chat_template(user("x"))
    assert tokenizer.render_chat(user("x"), chat_template="{{ messages[0].content }}") == "x"
