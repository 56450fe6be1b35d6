"""`kvern run` around a scripted engine: prompts, flags, output."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from tests.cli.conftest import Command
from tests.cli.fake_engine import FakeLLM

from kvern.core.miss import MissReason, MissReport
from kvern.errors import CapacityError, InputError

Captured = pytest.CaptureFixture[str]


def test_streams_the_answer(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("run", "Hi") == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello there.\n"
    assert printed.err == ""
    assert engine.made.tokenizer.decode(engine.made.prompts[0], False) == "<u>Hi\x03<a>"
    assert engine.made.options == {}


@pytest.mark.parametrize("piped", [b"Hi", b"Hi\n", b"Hi\r\n"])
def test_reads_the_prompt_from_stdin(
    piped: bytes, engine: type[FakeLLM], kvern_command: Command
) -> None:
    assert kvern_command("run", "--raw", stdin=piped) == 0
    assert engine.made.prompts == ["Hi"]


def test_flags_reach_the_engine(engine: type[FakeLLM], kvern_command: Command) -> None:
    line = (
        "run --raw --model a.gguf --kv-format fp32 --kv-memory 1GiB --context 99 --block-size 8 "
        "--weights-format fp32 --backend reference --threads 2 --no-cache --max-tokens 5 "
        "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --stop A --stop B Hi"
    )
    assert kvern_command(*line.split()) == 0
    assert engine.made.path == "a.gguf"
    assert engine.made.options == {
        "kv_format": "fp32",
        "kv_memory": "1GiB",
        "max_model_len": 99,
        "block_size": 8,
        "weights_format": "fp32",
        "backend": "reference",
        "threads": 2,
        "no_cache": True,
    }
    params = engine.made.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, tuple(params.stop)) == (0.1, 3, ("A", "B"))


def test_base_model_completes_the_bare_text(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    engine.chat_template = None
    assert kvern_command("run", "Once upon") == 0
    assert engine.made.prompts == ["Once upon"]
    assert "no chat template" in capsys.readouterr().err


def test_json_is_one_object(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("run", "Hi", "--json", "--stats") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["text"] == "Hello there."
    assert document["finish_reason"] == "stop"
    assert document["prompt_token_ids"] == [ord(char) for char in "<u>Hi\x03<a>"]
    assert document["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert set(document["timing"]) == {"load_s", "ttft_s", "tpot_s", "e2e_s"}
    assert document["kv"]["bytes_per_token"] == 23_040
    (reason,) = document["miss"]["reasons"]
    assert reason["kind"] == "never_stored"
    assert reason["explanation"] == "from token 0 on nothing was ever stored"
    assert document["work"]["tokens_processed"] == 9 + 13 - 1
    assert "prompt " in printed.err  # --stats goes to stderr


def test_stats_in_plain_words(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("run", "Hi", "--stats") == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines() if line]
    assert [words[0] for words in lines] == ["prompt", "not", "answer", "time", "KV", "work"]
    told = {words[0]: words[1] for words in lines}
    assert told["prompt"] == "9 tokens, 0 of them from the cache"
    assert told["not"] == "cached: from token 0 on nothing was ever stored"
    assert told["answer"] == "13 tokens; ended because the model was done"
    assert "0.05 s to the first token, then 10.0 ms per token (100 tokens/s)" in told["time"]
    assert "3 of 729 blocks used (1.1 of 256.3 MiB)" in told["KV"]
    assert told["work"].startswith("21 tokens processed")

    assert kvern_command("run", "Hi", "--stats", "--no-cache") == 0
    assert "KV cache  not used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "age_s", "told"),
    [
        ("replaced", 12.3, "from token 16 on it was replaced 12 s ago"),
        ("replaced", 0.31, "from token 16 on it was replaced 0.3 s ago"),
        ("cleared", 7200.0, "from token 16 on it was cleared 2 h ago"),
    ],
)
def test_what_is_gone_from_the_cache_has_an_age_and_no_clock_reading(
    kind: Literal["replaced", "cleared"],
    age_s: float,
    told: str,
    engine: type[FakeLLM],
    kvern_command: Command,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = MissReason(kind, 16, when=4529.407, age_s=age_s)
    report = MissReport(20, 16, ((0, 16),), (reason,))
    monkeypatch.setattr("tests.cli.fake_engine._miss", lambda *_: report)
    assert kvern_command("run", "Hi", "--stats") == 0
    printed = capsys.readouterr().err
    assert f"not cached: {told}\n" in printed
    assert "4529" not in printed

    engine.answers = ("One.",)
    assert kvern_command("chat", "--stats", stdin=b"Hi\n") == 0
    assert f"[not cached: {told}]" in capsys.readouterr().err

    assert kvern_command("run", "Hi", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["miss"]["reasons"]
    assert (row["kind"], row["age_s"], row["explanation"]) == (kind, age_s, told)


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["run", ""], None, "the prompt is empty"),
        (["run"], b"", "the prompt is empty"),
        (["run"], b"\n", "the prompt is empty"),
        (["run"], b"caf\xe9", "not UTF-8 text (byte 3 is 0xe9)"),
        (["run", "caf\udce9"], None, "not UTF-8 text"),
        (["run", "--max-tokens", "0", "Hi"], None, "max_tokens is 0"),
        (["run", "--temperature", "nan", "Hi"], None, "temperature is nan"),
        (["run", "--temperature", "-1", "Hi"], None, "temperature is -1.0"),
        (["run", "--top-p", "1.5", "Hi"], None, "top_p is 1.5"),
        (["run", "--top-k", "-2", "Hi"], None, "top_k is -2"),
        (["run", "--stop", "", "Hi"], None, "stop string"),
        (["run", "--stop", "caf\udce9", "Hi"], None, "the stop string is not UTF-8 text"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_1(
    arguments: list[str],
    stdin: bytes | None,
    sentence: str,
    engine: type[FakeLLM],
    kvern_command: Command,
    capsys: Captured,
) -> None:
    assert kvern_command(*arguments, stdin=stdin) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1


def test_no_prompt_on_a_terminal_is_wrong_usage(
    engine: type[FakeLLM], kvern_command: Command, capsys: Captured
) -> None:
    assert kvern_command("run") == 2
    assert "give a PROMPT, or pipe it" in capsys.readouterr().err


def test_engine_refusal_is_passed_on(
    engine: type[FakeLLM],
    kvern_command: Command,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("the prompt has 9,120 tokens, the limit is 8,192: shorten it")

    monkeypatch.setattr(engine, "stream", refuse)
    assert kvern_command("run", "Hi") == 1
    assert "9,120 tokens, the limit is 8,192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "chat_template", "note"),
    [
        (["run", "Hi"], "template", " (the chat template adds 7 tokens; `--raw` leaves it out)"),
        (["run", "--raw", "Hi"], "template", ""),
        (["run", "Hi"], None, ""),
    ],
)
def test_too_long_a_prompt_names_what_the_template_adds(
    arguments: list[str],
    chat_template: str | None,
    note: str,
    engine: type[FakeLLM],
    kvern_command: Command,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise CapacityError("the prompt has 9 tokens and the context 8: shorten it")

    monkeypatch.setattr(engine, "stream", refuse)
    engine.chat_template = chat_template
    assert kvern_command(*arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: the prompt has 9 tokens and the context 8: shorten it{note}"
