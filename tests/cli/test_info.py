"""``edgespec info``, ``devices``, ``cache`` and ``pull``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgespec.export.source.source import resolve
from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.devices.webgpu import DEVICES, DeviceState
from edgespec.runtimes.files.manifest import Manifest, Operators
from edgespec.runtimes.ort.native_library import native_library
from tests.cli.conftest import Command, export
from tests.conftest import DRAFT, OPERATORS, TARGET


def test_json(command: Command, demo: Path) -> None:
    result = command("info", demo, "--json")
    made = result.json
    assert result.err == ""
    assert made.keys() == {"bundle", "operators", "expected_speedups", "manifest"}
    assert made["operators"].keys() == {"active", "reason", "exact_rows", "layout", "repacked_bytes", "graphs"}
    assert made["operators"]["layout"] == "native"
    assert made["operators"]["graphs"] == {"gated": "stock", "plain": "stock", "native": "native"}
    assert made["manifest"].keys() == set(Manifest.model_fields)
    assert Manifest.model_validate(made["manifest"]) == Manifest.model_validate_json(
        (demo / "edgespec.json").read_text("utf-8")
    )


def test_table_on_a_small_terminal(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command("info", demo)
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 80
    for word in ("model", "shape", "draft", "format", "context", "size", "KV", "operators", "parity", "made by"):
        assert f"\n {word} " in f"\n{result.out}"
    for word in ("int4", "1024 tokens", "ngram", "self-spec", "speculative", "skips"):
        assert word in " ".join(result.out.split())


def test_names_are_not_markup(command: Command, chatty: Path) -> None:
    assert "[red]a $b$ :+1:: llama" in command("info", chatty).out


def test_what_the_export_noted_is_printed_once(command: Command, demo: Path, tmp_path: Path) -> None:
    """They are printed whole, below the table, without the notes that a method's row already has."""
    folder = Path(shutil.copytree(demo, tmp_path / "noted"))
    manifest = json.loads((folder / "edgespec.json").read_text("utf-8"))
    manifest["methods"]["speculative"]["notes"] = "right half the time; as measured"
    manifest["provenance"]["notes"] = ["read in another way", "as measured"]
    (folder / "edgespec.json").write_text(json.dumps(manifest), "utf-8")
    out = command("info", folder, "--no-check").out
    assert out.count("as measured") == 1
    assert out.count("note: read in another way") == 1


@pytest.fixture
def altered(demo: Path, tmp_path: Path) -> Path:
    """Make a bundle with one byte changed."""
    folder = Path(shutil.copytree(demo, tmp_path / "altered"))
    data = bytearray((folder / "model.strict.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.strict.onnx").write_bytes(data)
    return folder


def test_an_altered_file_is_named(command: Command, altered: Path) -> None:
    for name in ("info", "bench", "verify"):
        command(name, altered).refused(1, "model.strict.onnx: altered", "hint: ", "--no-check")
    command("run", altered, "--prompt", "x").refused(1, "model.strict.onnx: altered")
    assert command("info", altered, "--no-check").code == 0


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_graph_that_cannot_be_loaded(command: Command, altered: Path, operators: Operators) -> None:
    graph = altered / ("model.native.onnx" if operators == "native" else "model.strict.onnx")
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    command("run", altered, "--no-check", "--prompt", "x", "--operators", operators).refused(1, graph.name)


def test_a_missing_and_a_short_file(command: Command, demo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo, tmp_path / "short"))
    weights = next(folder.glob("draft/*.data"))
    weights.write_bytes(weights.read_bytes()[:-1])
    command("info", folder, "--no-check").refused(1, weights.name, "truncated", "hint: ")
    weights.unlink()
    command("info", folder).refused(1, weights.name, "missing from the bundle", "hint: ")


def test_wrong_input(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command("info").refused(2, "Missing argument 'BUNDLE'")
    command("info", tmp_path).refused(1, "has no edgespec.json", "hint: make one with `edgespec export MODEL`")
    command("info", tmp_path / "file").refused(1, "is not a folder")
    (tmp_path / "edgespec.json").write_text("{", "utf-8")
    command("info", tmp_path).refused(1, "edgespec.json: not readable as JSON", "hint: ")
    (tmp_path / "edgespec.json").write_text('{"schema_version": 99}', "utf-8")
    command("info", tmp_path).refused(1, "schema 99 is newer", "hint: upgrade edgespec")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache of this test's own."""
    folder = tmp_path / "own"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


@pytest.mark.usefixtures("native")
def test_converted_weights_are_shown_limited_and_cleared(command: Command, own: Path, tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", DRAFT, "--quantizer", "rtn")
    assert command("cache", "clear").code == 0  # what the export kept
    assert command("cache", "list").out == f"0 B in {own}, limit 32.00 GiB\n"
    kinds = [
        command("run", bundle, "--operators", kind, "--prompt", "A", "--json").code for kind in ("stock", "native")
    ]
    assert kinds == [0, 0]
    found = command("cache", "list", "--json").json
    assert (found["folder"], found["limit"]) == (str(own), 32 << 30)
    (weights,) = [entry for entry in found["entries"] if entry["kind"] == "weights"]
    assert weights["source"].startswith(str(bundle))
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"]) >= weights["bytes"] > 0
    assert command("cache", "clear", "--gone", "--json").json["removed"] == []
    shutil.rmtree(bundle)
    shown = command("cache", "list").out
    assert "(gone)" in shown
    assert "edgespec cache clear weights --gone" in shown
    limited = command("cache", "limit", "1KiB", "--json").json
    assert [entry["path"] for entry in limited["removed"]] == [weights["path"]]
    assert not Path(weights["path"]).exists()
    assert command("cache", "list", "--json").json["limit"] == 1024
    assert command("cache", "limit", "off").code == 0
    assert "no limit" in command("cache", "list").out
    cleared = command("cache", "clear")
    assert (cleared.code, cleared.out[:8]) == (0, "removed ")
    assert command("cache", "list", "--json").json["entries"] == []


def test_refusals(command: Command, own: Path) -> None:
    command("cache", "limit", "huge").refused(1, "'huge' is no amount of memory", "hint: ")
    command("cache", "limit").refused(2, "SIZE")
    command("cache", "clear", "everything").refused(2, "everything")
    assert not own.exists()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("device") / "bundle", TARGET, "--device", "webgpu", "--format", "fp32")


@pytest.mark.usefixtures("native")
def test_paths_for_programs_in_c(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = command("paths", "--json").json
    assert (Path(found["include"]) / "edgespec.h").is_file()
    assert Path(found["library"]).is_file()
    assert (Path(found["cmake"]) / "edgespec-config.cmake").is_file()
    assert (Path(found["pkgconfig"]) / "edgespec.pc").is_file()
    assert found["library"] in command("paths").out
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    native_library.cache_clear()
    refused = command("paths")
    native_library.cache_clear()
    assert refused.code == 1
    assert "EDGESPEC_NATIVE=0" in refused.err


def test_devices_are_listed(command: Command) -> None:
    found = command("devices", "--json").json["devices"]
    assert [state["name"] for state in found] == list(DEVICES)
    assert all(set(state) == {"name", "usable", "reason", "hint", "precisions"} for state in found)
    assert found[0]["usable"]
    shown = command("devices").out
    assert all(state["reason"] in shown for state in found)


def test_why_a_device_is_not_usable(
    command: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(devices.LIBRARY, str(tmp_path / "none.so"))
    shown = command("devices").out
    assert "webgpu: not usable" in shown
    assert "none.so: no such file" in shown
    for name in ("run", "bench", "verify"):
        more = ["--prompt", "A"] if name == "run" else []
        refused = command(name, bundle, "--device", "webgpu", *more)
        refused.refused(1, "device webgpu: ", "none.so: no such file", "hint: ")


def test_no_adapter_is_said(command: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = DeviceState("webgpu", False, "the provider is there, but no adapter", "install a driver")
    monkeypatch.setattr(devices, "webgpu_state", lambda: none)
    command("run", bundle, "--device", "webgpu", "--prompt", "A").refused(1, "no adapter", "hint: install a driver")


def test_a_bundle_without_graphs_for_a_device(command: Command, demo: Path) -> None:
    command("run", demo, "--device", "webgpu", "--prompt", "A").refused(1, "export it again with `--device webgpu`")
    command("run", demo, "--device", "npu", "--prompt", "A").refused(2, "npu")
    assert "devices" in command("info", demo).out


def test_graphs_in_both_precisions(command: Command, tmp_path: Path) -> None:
    both = export(
        tmp_path / "both", TARGET, "--device", "webgpu", "--device-precision", "fp16", "--device-precision", "fp32"
    )
    assert "cpu, webgpu (fp16, fp32)" in command("info", both).out
    graphs = command("info", both, "--json").json["manifest"]["target"]["graphs"]
    assert graphs["webgpu"]["precision"] == "fp32"
    assert graphs["webgpu-fp16"]["precision"] == "fp16"
    refused = command("run", both, "--device-precision", "fp16", "--prompt", "A")
    refused.refused(1, "device precision fp16: device cpu has none")
    output = tmp_path / "none"
    command("export", TARGET, "-o", output, "--device-precision", "fp16").refused(
        1, "no --device", "add --device webgpu"
    )
    assert not output.exists()


def test_a_bundle_says_its_devices(command: Command, bundle: Path) -> None:
    shown = command("info", bundle).out
    assert "cpu, webgpu" in shown
    graphs = command("info", bundle, "--json").json["manifest"]["target"]["graphs"]
    assert {graph["device"] for graph in graphs.values()} == {"cpu", "webgpu"}
    assert command("run", bundle, "--prompt", "ROMEO:", "--max-new-tokens", "4", "--json").json["device"] == "cpu"


def test_a_model_that_the_provider_computes_wrongly(
    command: Command, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    refused = command("export", checkpoint("gemma2_caps"), "-o", output, "--device", "webgpu")
    refused.refused(1, "attention caps its scores", "use it on the CPU")
    assert not output.exists()


def test_a_format_that_no_device_has(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    command("export", TARGET, "-o", output, "--device", "webgpu", "--format", "w8a8").refused(
        1, "--device webgpu and --format w8a8"
    )
    assert not output.exists()


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
    Hub.files = {file.name: file.read_bytes() for file in source.iterdir()} | {
        "photo.png": b"x",
        "pytorch_model.bin": b"x",
    }
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
    assert not {"photo.png", "pytorch_model.bin"} & set(Hub.asked)  # neither is needed, and the one is a pickle
    listed = json.loads(edgespec(home, hub, "pull", "--list", "--json").stdout)
    assert [row["model"] for row in listed["models"]] == [MODEL]
    assert MODEL in edgespec(home, hub, "pull", "--list").stdout
    nowhere = "http://127.0.0.1:9"  # a port where nothing listens
    output = str(tmp_path / "bundle")
    made = edgespec(home, nowhere, "export", MODEL, "--format", "fp32", "-o", output, HF_HUB_OFFLINE="1")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "bundle" / "edgespec.json").is_file()


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([], 2, "give a model's hub id, or --list"),
        ([MODEL, "--list"], 2, "give a model's hub id, or --list"),
        (["builtin:shakespeare"], 1, "expected a hub id"),
    ],
)
def test_what_is_no_model_of_the_hub(command: Command, arguments: list[str], code: int, message: str) -> None:
    command("pull", *arguments).refused(code, message)


def test_a_model_that_the_hub_does_not_have(tmp_path: Path, hub: str) -> None:
    ran = edgespec(tmp_path, hub, "pull", "nobody/nothing")
    assert ran.returncode == 1
    assert "the hub could not provide it" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = edgespec(tmp_path, hub, "pull", "--list")
    assert (ran.returncode, ran.stdout) == (0, "no model was downloaded yet\n")
