"""The dispatcher: help, usage errors, exit codes, what JSON readers get when something fails."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvern._version import __version__
from kvern.cli.main import COMMANDS, main
from kvern.cli.output import print_json
from kvern.errors import InputError

Captured = pytest.CaptureFixture[str]
KVERN = [sys.executable, "-m", "kvern"]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("kvern.cli.models.run", run)


def test_help_lists_every_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_keeps_the_protocol(name: str, capsys: Captured) -> None:
    module = importlib.import_module(f"kvern.cli.{name}")
    assert callable(module.run)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--json" in printed
    assert "--debug" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a command is missing"),
        (["walk"], "invalid choice: 'walk'"),
        (["models", "--bogus"], "unrecognized arguments: --bogus"),
        (["run", "--max-tokens", "many", "Hi"], "argument --max-tokens: invalid int value"),
        (["pull"], "the following arguments are required: MODEL"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: Captured
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("error: kvern")
    assert sentence in last


def test_json_and_debug_may_stand_before_the_command(capsys: Captured) -> None:
    assert main(["--json", "--debug", "models"]) == 0
    assert json.loads(capsys.readouterr().out)["default"] == "smollm2"


@pytest.mark.parametrize("with_json", [False, True])
def test_failure_is_one_sentence_and_one_object(
    with_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fail_with(monkeypatch, InputError("the prompt\n  is too long"))
    assert main(["models", *(["--json"] if with_json else [])]) == 1
    printed = capsys.readouterr()
    assert printed.err == "error: the prompt is too long\n"
    if with_json:
        expected = {"type": "InputError", "message": "the prompt is too long", "exit_code": 1}
        assert json.loads(printed.out) == {"error": expected}
    else:
        assert printed.out == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fail_with(monkeypatch, InputError("no"))
    assert main(["models", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "out of memory: give a smaller --kv-memory"),
        (OSError(errno.ENOMEM, "no"), "out of memory: give a smaller --kv-memory"),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: Permission denied"),
        (ZeroDivisionError("division by\nzero"), "unexpected ZeroDivisionError: division by zero"),
    ],
)
def test_what_nobody_expected_is_a_sentence_too(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fail_with(monkeypatch, error)
    assert main(["models"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {sentence}")
    assert "Traceback" not in printed


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["models"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_broken_pipe_is_quiet() -> None:
    script = "import sys; from kvern.cli.main import main; sys.exit(main(['models', '--json']))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, timeout=30
    )
    os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 1


def run_kvern(redirections: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    line = f'exec "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *KVERN, *arguments], capture_output=True, timeout=60
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_closed_stdout_is_refused_before_anything_is_done(name: str) -> None:
    done = run_kvern(">&-", name)
    assert done.returncode == 1
    sentence = b"error: standard output is closed: send it to a file, a pipe or /dev/null\n"
    assert done.stderr == sentence


@pytest.mark.parametrize("arguments", [[], ["--version"], ["--help"], ["models", "--json"]])
def test_every_stream_may_be_closed(arguments: list[str]) -> None:
    for redirections in (">&- 2>&-", "<&- >&- 2>&-", ">&- 2>/dev/full"):
        done = run_kvern(redirections, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_messages_never_reach_stdout_when_stderr_is_closed() -> None:
    done = run_kvern("2>&-", "pull", "smollm9", "--json")
    assert done.returncode == 1
    assert "unknown model" in json.loads(done.stdout)["error"]["message"]
    assert run_kvern("2>&-", "pull", "smollm9").stdout == b""
    assert json.loads(run_kvern("2>&-", "models", "--json").stdout)["default"] == "smollm2"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--version"]])
def test_full_disk_under_stdout_is_one_sentence(arguments: list[str]) -> None:
    done = run_kvern(">/dev/full", *arguments)
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_error_keeps_its_exit_code_when_nobody_can_read_it() -> None:
    for redirections in ("2>/dev/full", ">/dev/full", ">/dev/full 2>/dev/full", ">&- 2>/dev/full"):
        done = run_kvern(redirections, "models", "--bogus", "--json")
        assert done.returncode == (1 if ">&-" in redirections else 2)
        assert b"Traceback" not in done.stderr
        assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "--debug"]])
def test_json_without_a_command_is_one_sentence(arguments: list[str], capsys: Captured) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    message = json.loads(printed.out)["error"]["message"]
    assert printed.err.splitlines()[-1] == f"error: {message}"
    assert "usage:" not in printed.err
    if "--debug" not in arguments:
        assert len(printed.err.splitlines()) == 1


def test_termination_runs_the_clean_up(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        "import kvern.cli.models as models\n"
        "from kvern.cli.main import entry_point\n"
        "def run(args):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "models.run = run\n"
        "sys.argv = ['kvern', 'models']\n"
        "entry_point()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "cleaned up\n"
    assert done.stderr == ""


def test_json_knows_what_results_are_made_of(capsys: Captured) -> None:
    numpy = pytest.importorskip("numpy")
    print_json(
        {
            "path": Path("/a"),
            "number": numpy.float32(0.5),
            "array": numpy.arange(2),
            "set": frozenset({2, 1}),
            "nan": float("nan"),
            "text": "kvärn \ud800",
        }
    )
    assert json.loads(capsys.readouterr().out) == {
        "path": "/a",
        "number": 0.5,
        "array": [0, 1],
        "set": [1, 2],
        "nan": None,
        "text": "kvärn ?",
    }


def test_version_names_the_kernels(capsys: Captured) -> None:
    assert main(["--version", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["version"] == __version__
    assert about["backend"] == ("native" if about["native"] else "reference")
    assert about["kernel_path"]
    assert "KVERN_REQUIRE_NATIVE=1" in about["rebuild"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"kvern {__version__}\nbackend {about['backend']}")


@pytest.mark.usefixtures("require_native")
def test_version_says_native_where_it_is_built(capsys: Captured) -> None:
    main(["--version", "--json"])
    about = json.loads(capsys.readouterr().out)
    assert about["backend"] == "native", about["native_problem"]


def test_version_says_why_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.setattr("kvern.cli.version._package_folder", lambda: tmp_path)
    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert "backend reference (numpy, slow): the native kernels were not built" in printed
    assert "install a C++17 compiler" in printed


def test_version_says_why_kernels_do_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.setattr("kvern.cli.version._package_folder", lambda: tmp_path)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / f"_native{suffix}").write_bytes(b"not a library")
    assert main(["--version"]) == 0
    assert "the native kernels do not load" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models"], ["run", "--help"]])
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from kvern.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'torch', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
