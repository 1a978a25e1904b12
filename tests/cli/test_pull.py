"""Downloading from a hub: here a small one of our own, which speaks the hub's protocol on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgespec.export.source.source import resolve

MODEL, COMMIT = "someone/small", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves the embedded model, a picture and a pickle as one repository."""

    asked: list[str] = []  # noqa: RUF012  one server at a time
    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        if path.startswith(f"api/models/{MODEL}/tree/"):
            tree = [{"type": "file", "path": name, "size": len(b), "oid": "0" * 40} for name, b in self.files.items()]
            self._send(json.dumps(tree).encode(), "application/json")
        elif path.startswith(f"api/models/{MODEL}"):
            listed = [{"rfilename": name} for name in self.files]
            self._send(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": listed}).encode(), "application/json")
        elif path.startswith(f"{MODEL}/resolve/{COMMIT}/") and (name := path.rpartition("/")[2]) in self.files:
            if self.command == "GET":
                self.asked.append(name)
            self._send(self.files[name], "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    source = resolve("builtin:shakespeare-draft")
    Hub.files = {file.name: file.read_bytes() for file in source.iterdir()} | {"photo.png": b"x", "model.bin": b"x"}
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def edgespec(home: Path, hub: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    where = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [sys.executable, "-m", "edgespec", *arguments]
    return subprocess.run(command, env=environment | where | more, capture_output=True, text=True, timeout=300)


def test_a_model_is_pulled_listed_and_exported_without_the_hub(tmp_path: Path, hub: str) -> None:
    home = tmp_path / "home"
    ran = edgespec(home, hub, "pull", MODEL, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    folder = Path(found["folder"])
    source = resolve("builtin:shakespeare-draft")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert found["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert not {"photo.png", "model.bin"} & set(Hub.asked)  # neither is needed, and the one is a pickle
    listed = json.loads(edgespec(home, hub, "pull", "--list", "--json").stdout)
    assert [row["model"] for row in listed["models"]] == [MODEL]
    assert MODEL in edgespec(home, hub, "pull", "--list").stdout
    nowhere = "http://127.0.0.1:9"  # a port that nobody listens on
    output = str(tmp_path / "bundle")
    made = edgespec(home, nowhere, "export", MODEL, "--format", "fp32", "-o", output, HF_HUB_OFFLINE="1")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "bundle" / "edgespec.json").is_file()


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ([], 2, "give a model's hub id, or --list"),
        ([MODEL, "--list"], 2, "give a model's hub id, or --list"),
        (["builtin:shakespeare"], 1, "expected a hub id"),
        (["nobody/nothing"], 1, "the hub could not provide it"),
    ],
)
def test_what_cannot_be_pulled(tmp_path: Path, hub: str, arguments: list[str], status: int, message: str) -> None:
    ran = edgespec(tmp_path, hub, "pull", *arguments)
    assert ran.returncode == status
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_empty_cache_is_no_error(tmp_path: Path, hub: str) -> None:
    ran = edgespec(tmp_path, hub, "pull", "--list")
    assert (ran.returncode, ran.stdout) == (0, "no model was downloaded yet\n")
