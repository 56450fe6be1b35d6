"""The native backend as an object: paths, threads, forks, refusals, memory."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.kernels.batches import slots_batch

from kvern.errors import UnsupportedModelError, UsageError
from kvern.kernels import native
from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import Backend, HostTensor, PagedStream

from .native_cases import PATHS, random_tensor

pytestmark = pytest.mark.usefixtures("require_native")


def test_it_is_a_backend() -> None:
    backend = NativeBackend(2)
    assert isinstance(backend, Backend)
    assert backend.row_invariant
    assert backend.num_threads == 2
    assert native.native_available()
    assert native.native_unavailable_reason() is None


def test_paths_are_forced_by_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeBackend(1).kernel_path == PATHS[0]
    assert "portable" in PATHS
    assert native._native.kernel_path().startswith(PATHS[0])
    tags = {NativeBackend(1, path).numerics_tag("auto") for path in PATHS}
    assert len(tags) == len(PATHS)
    monkeypatch.setenv("KVERN_KERNEL_PATH", "portable")
    assert NativeBackend(1).kernel_path == "portable"
    assert NativeBackend(1, PATHS[0]).kernel_path == PATHS[0]
    monkeypatch.setenv("KVERN_KERNEL_PATH", "sse9")
    with pytest.raises(UsageError, match="'sse9' cannot run on this machine: choose one of"):
        NativeBackend(1)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="number of threads is 0"):
        NativeBackend(0)
    backend = NativeBackend(1)
    with pytest.raises(UnsupportedModelError, match="Q2_K"):
        backend.prepare([HostTensor("w", "Q2_K", 1, 256, np.zeros(84, np.uint8))], "auto")
    with pytest.raises(UsageError, match="int3"):
        backend.prepare([random_tensor("F32", 2, 2)], "int3")
    with pytest.raises(ValueError, match="takes 34 bytes, got 33"):
        backend.prepare([HostTensor("w", "Q8_0", 1, 32, np.zeros(33, np.uint8))], "auto")
    with pytest.raises(ValueError, match="40 columns are not a whole number of Q8_0 blocks"):
        backend.prepare([HostTensor("w", "Q8_0", 1, 40, np.zeros(34, np.uint8))], "auto")


def test_wrong_shapes_raise_value_error() -> None:
    backend = NativeBackend(1)
    weight = backend.prepare([random_tensor("F32", 8, 16)], "auto")
    x = np.zeros((3, 16), np.float32)
    with pytest.raises(ValueError, match="out has 7 entries"):
        backend.matmul(x, weight, np.zeros((3, 7), np.float32))
    with pytest.raises(ValueError, match="x has 15 entries"):
        backend.matmul(np.zeros((3, 15), np.float32), weight, np.zeros((3, 8), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        backend.matmul(np.zeros((16, 3), np.float32).T, weight, np.zeros((3, 8), np.float32))
    with pytest.raises(TypeError):  # never a silent copy whose result is lost
        backend.matmul(x, weight, np.zeros((3, 8), np.float64))
    with pytest.raises(ValueError, match="token id 8"):
        backend.embed(weight, np.array([8], np.int32), np.zeros((1, 16), np.float32))
    stream = PagedStream(np.zeros((3, 4 * 2 * 4), np.uint8), 0, "fp32", 1, 4, 2)
    for slot in (0, 3, 12, -1):
        with pytest.raises(ValueError, match="outside blocks 1 to 2"):
            backend.append(np.zeros((1, 1, 2), np.float32), stream, slots_batch([slot]))
    wide = PagedStream(np.zeros((3, 31), np.uint8), 0, "fp32", 1, 4, 2)
    with pytest.raises(ValueError, match="do not fit into pages"):
        backend.append(np.zeros((1, 1, 2), np.float32), wide, slots_batch([4]))


def run_product(backend: NativeBackend) -> bytes:
    weight = backend.prepare([random_tensor("Q4_1", 400, 512)], "auto")
    x = np.random.default_rng(0).standard_normal((20, 512)).astype(np.float32)
    out = np.empty((20, 400), np.float32)
    backend.matmul(x, weight, out)
    return out.tobytes()


def test_a_forked_child_starts_its_own_threads() -> None:
    backend = NativeBackend(3)
    expected = run_product(backend)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest machinery in the child: report and leave at once
        os.write(writer, b"same" if run_product(backend) == expected else b"diff")
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.read(reader, 4) == b"same"
    os.close(reader)
    assert run_product(backend) == expected


def test_several_python_threads_share_a_backend() -> None:
    backend = NativeBackend(2)
    expected = run_product(backend)
    results: list[bytes] = []
    callers = [
        threading.Thread(target=lambda: results.append(run_product(backend))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [expected] * 4


def test_idle_threads_sleep() -> None:
    backend = NativeBackend(4)
    run_product(backend)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_prepared_map_is_let_go(tmp_path: Path) -> None:
    """Packing reads the file's pages and then releases them: the weight is resident once."""
    tensor = random_tensor("Q8_0", 2048, 4096)
    path = tmp_path / "weights"
    tensor.data.tofile(path)

    def mapped_kib() -> int:
        text = Path("/proc/self/smaps").read_text().split(str(path))
        return int(text[1].split("Rss:")[1].split()[0]) if len(text) > 1 else 0

    if not os.path.exists("/proc/self/smaps"):
        pytest.skip("needs /proc")
    with open(path, "rb") as file:
        view = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    assert int(view[::512].sum(dtype=np.int64)) > 0
    assert mapped_kib() > 4096
    weight = NativeBackend(2).prepare([HostTensor("w", "Q8_0", 2048, 4096, view)], "auto")
    assert weight.nbytes_owned == 2048 * 4096 // 32 * 34
    assert mapped_kib() < 64
    np.testing.assert_array_equal(view, tensor.data)
