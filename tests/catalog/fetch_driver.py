"""A process that fetches the entry of a fake index, with a stand-in for pip that takes its time.

usage: fetch_driver.py HOME INDEX_FOLDER LOG SECONDS

The stand-in appends a line to LOG, writes half a wheel, sleeps SECONDS, then delivers the wheels.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.catalog.fake_index import load_entry

from kvern.catalog import StderrProgress, fetch_entry, pip_download


def stand_in_for_pip(index: Path, dest: Path, log: Path, seconds: float) -> None:
    wheels = sorted(index.glob("*.whl"))
    (dest / "half.part").write_bytes(wheels[0].read_bytes()[:20])
    with log.open("a") as file:
        file.write("pip started\n")
    time.sleep(seconds)
    for wheel in wheels:
        shutil.copy(wheel, dest)


def main() -> None:
    # A shell that starts the tests in the background has it ignored, by all that they start too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "--pip":
        index, dest, log, seconds = sys.argv[2:]
        stand_in_for_pip(Path(index), Path(dest), Path(log), float(seconds))
        return
    home, index, log, seconds = sys.argv[1:]
    pip_download.pip_command = lambda requirements, wheels, log_path: [
        *(sys.executable, __file__, "--pip", index, str(wheels), log, seconds)
    ]
    entry = load_entry(Path(index) / "entry.json")
    print(fetch_entry(entry, home=Path(home), progress=StderrProgress()))


if __name__ == "__main__":
    main()
