"""The loop inside a worker process: one JSON object a line on stdin, one a line on stdout.

Runs as a script in any environment: ``python serve.py ADAPTER.py``. It needs the standard library
only and imports nothing of kvern, so that every engine is measured by the same lines. The adapter
is a file with a class ``Adapter``:

    load(options) -> dict      load the model; what it returns is reported (versions, bytes)
    run(work) -> dict          {"wall_s", "requests": [...]}; see `kvern.bench.figures`
    ...                        further operations by name, each with one dict, or none

Requests are ``{"op": NAME, "args": {...}}``, answers ``{"ok": true, "result": {...}}`` or
``{"ok": false, "error": SENTENCE}``. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main(adapter_path: str) -> int:
    """Serve until stdin ends or ``close`` is asked for."""
    _die_with_parent()
    answers = _private_stdout()
    adapter = _load_adapter(adapter_path)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": True, "result": _carry_out(adapter, request)}
        except Exception as error:
            traceback.print_exc()
            sentence = " ".join(str(error).split()) or "no message"
            answer = {"ok": False, "error": f"{type(error).__name__}: {sentence}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if request["op"] == "close":
            break
    return 0


def _carry_out(adapter: Any, request: dict[str, Any]) -> Any:
    operation, args = request["op"], request.get("args")
    if operation == "close":
        close = getattr(adapter, "close", None)
        return None if close is None else close()
    if operation == "run":
        reset_peak_memory()
    method = getattr(adapter, operation)
    result = method() if args is None else method(args)
    if operation == "run":
        result["peak_rss_bytes"] = peak_memory_bytes()
    return result


def _load_adapter(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("kvern_bench_adapter", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Adapter()


def _private_stdout() -> TextIO:
    """The real stdout for answers alone; file descriptor 1 becomes stderr for everybody else."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return private


def _die_with_parent() -> None:
    """On Linux the kernel ends this process when the benchmark dies, even while it is stopped."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


def _family() -> list[int]:
    """This process and all that it started."""
    found, unseen = [], [os.getpid()]
    while unseen:
        pid = unseen.pop()
        found.append(pid)
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                unseen += [int(child) for child in listed.read_text().split()]
            except OSError:
                continue
    return found


def reset_peak_memory() -> None:
    """Let the peak resident size begin anew, where the system can (Linux)."""
    for pid in _family():
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            continue


def peak_memory_bytes() -> int:
    """Largest resident size since the last reset, summed over this process and its children."""
    total = 0
    for pid in _family():
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    if total:
        return total
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    # Beside this file lie modules whose names must not hide a library's.
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent
    ]
    sys.exit(main(sys.argv[1]))
