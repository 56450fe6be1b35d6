"""`kvern chat` around a scripted engine, and the conversation's token ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command
from tests.cli.fake_engine import END, FakeLLM, FakeTokenizer

from kvern.cli.conversation import Conversation
from kvern.cli.main import main
from kvern.errors import CapacityError, InputError

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
    refusal = "the prompt has 9,120 tokens, the limit is 8,192"

    def refuse_long(self: FakeLLM, prompt: Any, params: Any) -> Iterator[Any]:
        if len(prompt) > 20:
            raise CapacityError(refusal)
        return stream(self, prompt, params)

    monkeypatch.setattr(engine, "stream", refuse_long)
    assert kvern_command("chat", stdin=b"A question that is too long\nHi\n") == 1
    printed = capsys.readouterr()
    assert printed.err == f"error: {refusal} (/reset starts over)\n"
    assert printed.out == "Hello there.\n"

    assert kvern_command("chat", "--json", stdin=b"A question that is too long\nHi\n") == 1
    failed, answered = json.loads(capsys.readouterr().out)["turns"]
    assert failed == {
        "user": "A question that is too long",
        "error": f"{refusal} (/reset starts over)",
    }
    assert answered["text"] == "Hello there."


def test_whoever_typed_has_seen_what_failed(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["Hi", "caf\udce9", "Hi"])

    def type_next(_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    def refuse(*_: Any) -> None:
        raise InputError("no")

    monkeypatch.setattr("builtins.input", type_next)
    monkeypatch.setattr(engine, "stream", refuse)
    assert kvern_command("chat") == 0
    lines = capsys.readouterr().err.splitlines()
    told = ["error: no", "error: the line is not UTF-8 text: check the terminal's encoding"]
    assert lines[1:] == [*told, "error: no", ""]


@pytest.mark.parametrize("turns", [1, 2])
def test_request_that_fails_in_the_engine(
    turns: int,
    engine: type[FakeLLM],
    kvern_command: Command,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = engine._output

    def failed(*arguments: Any) -> Any:
        result = output(*arguments)
        result.error = "an\ninvariant broke"
        return result

    engine.answers = ["One."] * turns
    monkeypatch.setattr(engine, "_output", staticmethod(failed))
    assert kvern_command("chat", "--json", stdin=b"Hi\n" * turns) == 1
    printed = capsys.readouterr()
    sentence = "the request failed: an invariant broke"
    assert json.loads(printed.out)["turns"] == [{"user": "Hi", "error": sentence}] * turns
    assert printed.err == f"error: {sentence}\n" * turns


def test_base_model_is_refused(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    engine.chat_template = None
    assert kvern_command("chat", "--model", "gemma3-270m", stdin=b"Hi\n") == 1
    assert "gemma3-270m has no chat template" in capsys.readouterr().err


def test_input_that_is_not_text(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    piped = "Hi där\n".encode() + b"caf\xe9\nnever\n"
    assert kvern_command("chat", "--json", stdin=piped) == 1
    printed = capsys.readouterr()
    sentence = "standard input is not UTF-8 text (byte 11 is 0xe9): convert it first"
    assert printed.err == f"error: {sentence}\n"
    answered, failed = json.loads(printed.out)["turns"]
    assert (answered["user"], answered["text"]) == ("Hi där", "Hello there.")
    assert failed == {"user": "caf\ufffd", "error": sentence}


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_input_that_is_not_text_in_any_locale(command: str, locale: str) -> None:
    """Python decodes a piped stdin leniently in the C locale and strictly elsewhere."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "import kvern\n"
        "from kvern.cli import engine_options\n"
        "from kvern.cli.main import main\n"
        "from tests.cli.fake_engine import FakeLLM\n"
        "vars(kvern)['LLM'] = FakeLLM\n"
        "engine_options.resolve = lambda name, progress: Path(name)\n"
        f"sys.exit(main(['{command}']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=b"caf\xe9\n",
        capture_output=True,
        env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=Path(__file__).resolve().parents[2],
        timeout=60,
    )
    sentence = b"error: standard input is not UTF-8 text (byte 3 is 0xe9): convert it first\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", sentence)


def test_system_message_that_is_not_text(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("chat", "--system", "caf\udce9", stdin=b"Hi\n") == 1
    assert "the system message is not UTF-8 text" in capsys.readouterr().err


def test_closed_input_is_an_empty_one(
    engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"] == []


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
