"""`kvern chat` around a scripted engine, and the conversation's token ids."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.conftest import Command
from tests.cli.fake_engine import END, FakeLLM, FakeTokenizer

from kvern.cli.conversation import Conversation
from kvern.errors import InputError

Captured = pytest.CaptureFixture[str]


def text_of(engine: type[FakeLLM], turn: int) -> str:
    return engine.made.tokenizer.decode(engine.made.prompts[turn], skip_special_tokens=False)


def test_every_turn_finds_the_earlier_ones(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    engine.answers = ("One.", "Two.")
    assert kvern_command("chat", "--stats", stdin="Hi\nAnd då?\n".encode()) == 0
    printed = capsys.readouterr()
    assert printed.out == "One.\nTwo.\n"
    assert text_of(engine, 1) == f"<u>Hi{END}<a>One.{END}<u>And då?{END}<a>"
    assert "[9 prompt tokens, 0 of them from the cache; 5 new" in printed.err
    assert "[28 prompt tokens, 14 of them from the cache; 5 new" in printed.err
    told = '[not cached: token 14 differs: "<" in the prompt, "e" in what is stored]'
    assert told in printed.err


def test_reset_exit_and_unknown_commands(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    engine.answers = ("One.", "Two.")
    line = b"Hi\n/reset\n\n/what now\nAgain\n/exit\nnever\n"
    assert kvern_command("chat", "--system", "Be kind", stdin=line) == 0
    printed = capsys.readouterr()
    assert printed.out == "One.\nTwo.\n"
    assert text_of(engine, 1) == f"<s>Be kind{END}<u>Again{END}<a>"
    assert "the conversation starts over" in printed.err
    assert "/what is unknown" in printed.err


def test_interrupt_keeps_what_was_said(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answers = ("One long answer.", "Two.")
    stream = engine.stream

    def interrupted(self: FakeLLM, prompt: Any, params: Any) -> Iterator[Any]:
        for delta in stream(self, prompt, params):
            if len(self.prompts) == 1 and delta.text == " ":
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    monkeypatch.setattr(engine, "stream", interrupted)
    assert kvern_command("chat", "--json", stdin=b"Hi\nGo on\n") == 0
    document = json.loads(capsys.readouterr().out)
    assert [turn["text"] for turn in document["turns"]] == ["One ", "Two."]
    assert [turn["finish_reason"] for turn in document["turns"]] == ["abort", "stop"]
    assert text_of(engine, 1) == f"<u>Hi{END}<a>One {END}<u>Go on{END}<a>"


def test_too_long_a_history_ends_the_turn_not_the_chat(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.stream

    def refuse_long(self: FakeLLM, prompt: Any, params: Any) -> Iterator[Any]:
        if len(prompt) > 20:
            raise InputError("the prompt has 9,120 tokens, the limit is 8,192")
        return stream(self, prompt, params)

    monkeypatch.setattr(engine, "stream", refuse_long)
    assert kvern_command("chat", stdin=b"A question that is too long\nHi\n") == 0
    printed = capsys.readouterr()
    assert "the limit is 8,192 (/reset starts over)" in printed.err
    assert printed.out == "Hello there.\n"


def test_base_model_is_refused(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    engine.chat_template = None
    assert kvern_command("chat", "--model", "gemma3-270m", stdin=b"Hi\n") == 1
    assert "gemma3-270m has no chat template" in capsys.readouterr().err


def test_input_that_is_not_text(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("chat", stdin=b"caf\xe9\n") == 1
    assert "not UTF-8 text" in capsys.readouterr().err


class ForgetfulTokenizer(FakeTokenizer):
    """A template that shortens earlier answers, as reasoning models' templates do."""

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        kept = [
            {**m, "content": m["content"][:1]} if m["role"] == "assistant" else m for m in messages
        ]
        return super().render_chat(kept, add_generation_prompt)


def test_template_that_rewrites_its_past_is_rendered_anew() -> None:
    tokenizer = ForgetfulTokenizer()
    conversation = Conversation(tokenizer)
    prompt = conversation.ask("Hi")
    conversation.keep("Hi", prompt, tokenizer.encode("Hmm. Yes." + END), "Hmm. Yes.")
    assert tokenizer.decode(conversation.ask("So?"), False) == f"<u>Hi{END}<a>H{END}<u>So?{END}<a>"


def test_ids_are_kept_even_where_text_would_tokenise_otherwise() -> None:
    class MergingTokenizer(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(char) for char in text.replace("ab", "\u01fd")]

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return super().decode(ids, skip_special_tokens).replace("\u01fd", "ab")

    tokenizer = MergingTokenizer()
    conversation = Conversation(tokenizer)
    prompt = conversation.ask("Hi")
    answer_ids = [ord("a"), ord("b"), ord(END)]  # the model did not merge them
    conversation.keep("Hi", prompt, answer_ids, "ab")
    assert conversation.ask("So?")[: len(prompt) + 3] == prompt + answer_ids


def test_nothing_is_kept_of_a_question_that_failed() -> None:
    conversation = Conversation(FakeTokenizer())
    first = conversation.ask("Hi")
    assert conversation.ask("Hi") == first
