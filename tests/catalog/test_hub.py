"""Hub ids through the real huggingface_hub, against a hub on this machine; no network is needed."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvern import catalog
from kvern.cli.main import main
from kvern.errors import FetchError, ModelError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "other.bin": b"the same weights in another form",
    "q4.gguf": b"GGUF",
}


class Hub(BaseHTTPRequestHandler):
    """What the real hub answers about org/name, org/gated and everything else."""

    def do_GET(self) -> None:
        """Answers."""
        if self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            answer = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in FILES.items()
            ]
            self._send(200, json.dumps(tree if "/tree/" in self.path else answer).encode())
        elif self.path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self._send(200, FILES[self.path.rpartition("/")[2]])
        elif "org/gated" in self.path:
            self._send(403, b"", "GatedRepo")
        elif "org/broken" in self.path:
            self._send(400, b"")
        else:
            self._send(401, b"", "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815  the server looks for this name

    def _send(self, status: int, body: bytes, code: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, whose settings are those of a new machine."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return folder


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Sends the client there; it reads the address in two ways."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(hub_url: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_hub(monkeypatch, hub_url)
    return hub_url


@pytest.fixture
def no_hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a connection."""
    use_hub(monkeypatch, "http://127.0.0.1:9")


def put_snapshot(cache: Path, *names: str) -> Path:
    """A copy of these files of org/name as an earlier fetch leaves it."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_bytes(FILES[name])
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_pull_without_the_hub_is_one_sentence(
    no_hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "foo/bar", "--json"]) == 1
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["type"] == "FetchError"
    assert error["message"].startswith("cannot reach the hub for foo/bar, and it is not on this")
    assert printed.err == f"error: {error['message']}\n"


def test_run_without_the_hub_is_one_sentence(
    no_hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--model", "foo/bar", "Hi"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot reach the hub for foo/bar")


def test_settings_that_forbid_the_network(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("foo/bar", "foo/bar:model.gguf"):
        with pytest.raises(FetchError, match=r"cannot .* foo/bar"):
            catalog.resolve(name)


def test_looking_never_asks_the_hub(no_hub: None) -> None:
    for name in ("org/name", "org/name:model.gguf"):
        with pytest.raises(ModelError, match=f"not on this machine yet: run `kvern pull {name}`"):
            catalog.locate(name)


def test_copy_that_is_here_needs_no_hub(no_hub: None, hub_cache: Path) -> None:
    snapshot = put_snapshot(hub_cache, "config.json", "model.safetensors", "q4.gguf")
    assert catalog.resolve("org/name") == snapshot
    assert catalog.locate("org/name") == snapshot
    assert catalog.resolve("org/name:q4.gguf") == snapshot / "q4.gguf"


def test_copy_of_something_else_is_not_taken_for_the_model(no_hub: None, hub_cache: Path) -> None:
    snapshot = put_snapshot(hub_cache, "q4.gguf")
    assert catalog.resolve("org/name:q4.gguf") == snapshot / "q4.gguf"
    with pytest.raises(ModelError, match="kvern pull org/name"):
        catalog.locate("org/name")
    with pytest.raises(ModelError, match="kvern pull org/name:q8"):
        catalog.locate("org/name:q8.gguf")


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("org/other", ModelError, r"the hub has no org/other, or it is private"),
        ("org/name:model.gguf", ModelError, r"org/name has no file model\.gguf: check"),
        ("org/gated", ModelError, "org/gated asks you to accept its licence"),
        ("org/gated:model.gguf", ModelError, "org/gated asks you to accept its licence"),
        ("org/broken", FetchError, r"cannot (fetch|reach).* org/broken"),
        ("org/na--me", ModelError, r"org/na--me is no hub id \(.*\): write org/name"),
    ],
)
def test_hub_refusals(name: str, kind: type[Exception], match: str, hub: str) -> None:
    with pytest.raises(kind, match=match):
        catalog.resolve(name)


def test_fetches_from_the_hub(hub: str, hub_cache: Path) -> None:
    path = catalog.fetch("org/name")
    assert path.is_relative_to(hub_cache)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert (path / "config.json").read_bytes() == FILES["config.json"]

    assert catalog.fetch("org/name:q4.gguf").read_bytes() == FILES["q4.gguf"]


@pytest.mark.parametrize("command", ["pull", "run"])
def test_copy_that_was_interrupted_is_completed(command: str, hub: str, hub_cache: Path) -> None:
    snapshot = put_snapshot(hub_cache, "config.json")
    assert catalog.locate("org/name") == snapshot  # enough to look at
    ask = catalog.fetch if command == "pull" else catalog.resolve
    assert ask("org/name") == snapshot
    assert (snapshot / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_hub_id_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=r"pip install 'kvern\[hub\]'"):
        catalog.resolve("org/name")
