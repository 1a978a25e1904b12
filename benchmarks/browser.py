"""Measure tokens per second, memory and download in headless Chromium, compared with wllama and transformers.js.

    (cd web && npm ci && npm run modules && npm run build)
    npm install --ignore-scripts --prefix RIVALS @wllama/wllama @huggingface/transformers
    python -m benchmarks.browser web/dist BUNDLE --rivals RIVALS --gguf MODEL.gguf --onnx FOLDER FOLDER

Programs take turns, each in a new browser with an empty profile, on a page that is cross-origin isolated.  Each writes
a short text and a long one, greedily; tokens per second are those between the two, so without the prompt.  Memory is
the most proportional memory of the renderer (Linux), less that of an empty page.  Download: what the page fetched, the
program's and the model's.  Each FOLDER has model.onnx of onnxruntime-genai, also quantized by onnxruntime's
quantize_dynamic, and its tokenizer.
Prints a Markdown table and, with ``--json``, all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from benchmarks.common import conditions, show

PROMPT = "The history of the steam engine begins in the first century. It was"
MODELS = ".data", ".gguf", ".onnx", ".onnx_data", "tokenizer.json"
FLAGS = "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run"
PATIENCE = 600  # seconds of a page


class Server(ThreadingHTTPServer):
    """Serves a folder, what a page is to run, and takes what it found."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.asked: dict[str, Any] = {}
        self.found = Queue[dict[str, Any]]()
        self.sent = Counter[str]()  # bytes by kind


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path.endswith("/asked"):
            body = json.dumps(self.server.asked).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        kind = "model" if self.path.endswith(MODELS) else "program"
        while piece := source.read(1 << 20):
            outputfile.write(piece)
            self.server.sent[kind] += len(piece)

    def do_POST(self) -> None:
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, form: str, *words: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve a folder in threads."""
    with Server(folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def page(given: argparse.Namespace, folder: Path) -> None:
    """Put links to all files of the page into a folder."""
    (folder / "index.html").symlink_to(Path(__file__).resolve().with_name("browser.html"))
    links = {"edgespec": given.package, "bundle": given.bundle}
    if given.gguf:
        links |= {"wllama": given.rivals / "node_modules/@wllama/wllama/esm", "model.gguf": given.gguf}
    if given.onnx:
        links |= {"transformers": given.rivals / "node_modules/@huggingface/transformers/dist",
                  "ort": given.rivals / "node_modules/onnxruntime-web/dist"}  # fmt: skip
    for source in given.onnx:
        for_transformers(source, given.config, folder / "onnx" / source.name)
    for name, target in links.items():
        (folder / name).symlink_to(Path(target).resolve())


def for_transformers(source: Path, config: Path | None, folder: Path) -> None:
    """Make the folder of a model of onnxruntime-genai as transformers.js reads it.

    Its embedding becomes float32, as in models that are published for transformers.js: onnxruntime-web has no other.
    transformers.js takes the width of heads from the inputs for keys and values.
    """
    (folder / "onnx").mkdir(parents=True)
    for file in (*source.glob("*.json*"), *([config] if config else [])):
        (folder / file.name).symlink_to(file.resolve())
    model = onnx.load(source / "model.onnx", load_external_data=False)
    width = json.loads((source / "genai_config.json").read_text("utf-8"))["model"]["decoder"]["head_size"]
    for given in model.graph.input:
        if given.name.startswith("past_key_values."):
            given.type.tensor_type.shape.dim[3].dim_value = width
    stored = folder / "onnx" / "model.onnx_data"
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"]
    shutil.copyfile(source / entries[0].value, stored)
    for node in model.graph.node:
        if node.op_type == "GatherBlockQuantized":
            values = looked_up(node, model.graph, source)
            table = TensorProto(name=f"{node.name}.table", data_type=TensorProto.FLOAT, dims=values.shape)
            table.data_location = TensorProto.EXTERNAL
            for key, value in (("location", stored.name), ("offset", stored.stat().st_size), ("length", values.nbytes)):
                table.external_data.add(key=key, value=str(value))
            with stored.open("ab") as data:
                data.write(values.tobytes())
            model.graph.initializer.append(table)
            node.CopyFrom(helper.make_node("Gather", [table.name, node.input[1]], node.output, name=node.name))
    for entry in entries:
        entry.value = stored.name
    (folder / "onnx" / "model.onnx").write_bytes(model.SerializeToString())


def looked_up(node: NodeProto, graph: GraphProto, folder: Path) -> np.ndarray:
    """Give the float32 rows of a table of four bits that a node looks tokens up in."""
    shaped = {one.output[0]: one.input[0] for one in graph.node if one.op_type == "Reshape"}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    names = shaped.get(node.input[0], node.input[0]), node.input[2]
    codes, scales = (numpy_helper.to_array(tensors[name], str(folder)) for name in names)
    rows = len(codes)
    numbers = np.stack([codes.reshape(rows, -1) & 15, codes.reshape(rows, -1) >> 4], -1).reshape(rows, -1)
    scales = scales.reshape(rows, -1).astype(np.float32)
    return (numbers.astype(np.float32) - 8) * np.repeat(scales, numbers.shape[1] // scales.shape[1], 1)


def renderers(browser: int) -> list[int]:
    """Find the renderers among the processes that a browser has started."""
    parents, found = dict[int, int](), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        above = process
        while above in parents and above != browser:
            above = parents[above]
        try:
            if above == browser and b"--type=renderer" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


def proportional(process: int) -> int:
    """Give the bytes of a process, shared pages divided by their users."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def run(server: Server, browser: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Let one program write its texts in a new browser."""
    server.asked = asked
    server.sent.clear()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        words = [browser, *FLAGS, f"--user-data-dir={profile}", address]
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        peak, end, found = 0, monotonic() + PATIENCE, None
        try:
            while found is None and monotonic() < end and running.poll() is None:
                peak = max(peak, sum(proportional(process) for process in renderers(running.pid)))
                try:
                    found = server.found.get(timeout=0.25)
                except Empty:
                    continue
        finally:
            os.killpg(running.pid, signal.SIGKILL)  # renderers too
            running.wait()
    if found is None or "error" in found:
        raise RuntimeError("it did not end" if found is None else found["error"])
    return found | {"peak": peak, "sent": dict(server.sent)}


def rate(found: dict[str, Any]) -> float:
    """Tokens per second between the short text and the long one."""
    return 1000 * (found["long"]["tokens"] - found["short"]["tokens"]) / (found["long"]["ms"] - found["short"]["ms"])


def table(figures: dict[str, list[dict[str, Any]]], empty: int) -> str:
    """Markdown: a line for each program."""
    lines = ["| program | tokens/s | memory, MB | program, MB | model, MB |", "|---|---|---|---|---|"]
    for name, runs in figures.items():
        rates = sorted(rate(one) for one in runs)
        sent = runs[-1]["sent"]
        memory = (median(one["peak"] for one in runs) - empty) / 1e6
        lines.append(f"| {name} | {median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f}) | "
                     f"{memory:.0f} | {sent.get('program', 0) / 1e6:.1f} | {sent.get('model', 0) / 1e6:.0f} |"
                     )  # fmt: skip
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Run the programs in turn; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path, help="web/dist")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--methods", default="plain,", help="of edgespec, with commas between; nothing: the bundle's")
    parser.add_argument("--rivals", type=Path, help="the folder that has node_modules")
    parser.add_argument("--gguf", type=Path, help="the model for wllama")
    parser.add_argument("--onnx", type=Path, nargs="*", default=[], help="models for transformers.js")
    parser.add_argument("--config", type=Path, help="its config.json, where the folder has none")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if shutil.which(given.browser) is None:
        sys.exit(f"no {given.browser} here")
    named = {f"edgespec, {method or 'its choice'}": ("edgespec", method) for method in given.methods.split(",")}
    named |= {"wllama": ("wllama", "")} if given.gguf else {}
    named |= {f"transformers.js, {source.name}": ("transformers", source.name) for source in given.onnx}
    asked = {"threads": given.threads, "tokens": given.tokens, "context": given.context, "prompt": given.prompt}
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    with tempfile.TemporaryDirectory() as made:
        page(given, Path(made))
        with served(Path(made)) as server:
            empty = run(server, given.browser, asked | {"program": "nothing"})["peak"]
            for turn in range(given.runs):
                for name in list(named)[:: -1 if turn % 2 else 1]:
                    program, method = named[name]
                    try:
                        found = run(server, given.browser, asked | {"program": program, "method": method})
                    except RuntimeError as error:  # the others continue
                        print(f"{name}: {error}", file=sys.stderr)
                        del named[name], figures[name]
                        continue
                    figures[name].append(found)
                    print(f"{name}: {rate(found):.1f} tokens/s", file=sys.stderr)
    print(table(figures, empty))
    if given.json:
        show({"conditions": conditions(browser=given.browser), "asked": asked, "empty": empty, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
