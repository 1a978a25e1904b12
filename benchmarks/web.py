"""Measure a bundle in Chromium and wllama on the same weights, interleaved, with one thread each.

    python -m benchmarks.web BUNDLE --package web/dist [--wllama node_modules/@wllama/wllama --gguf FILE]

Each turn is another browser: it opens the model, writes a few tokens, and then those that are timed.  Memory is the
resident memory of the browser's processes less that of an empty page, at its largest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import click

PROMPT = "The history of the railway begins with"
EDGESPEC = """
import {{ Model }} from "./edgespec/index.js";
const begun = performance.now();
const model = await Model.open("bundle", {{ context: 1024 }});
const opened = performance.now() - begun;
const write = async (maxNewTokens) => {{
  let count = 0, text = "";
  for await (const one of model.generate({prompt}, {{ method: {method}, maxNewTokens, ignoreEos: true }}))
    (count += one.tokens.length), (text += one.text);
  return [count, text];
}};
await write(8);
await fetch("found", {{ method: "POST", body: "{{}}" }});
const start = performance.now();
const [count, text] = await write({tokens});
const counts = await model.counts();
const result = {{ opened, count, text, ms: performance.now() - start, prompt_ms: counts.promptMs,
  module: model.facts.memory, isa: model.facts.isa }};
"""
WLLAMA = """
import {{ Wllama }} from "./wllama/esm/index.js";
const begun = performance.now();
const model = new Wllama({{ default: "./wllama/esm/wasm/wllama.wasm" }}, {{ suppressNativeLog: true }});
await model.loadModel([await (await fetch("model.gguf")).blob()], {{ n_ctx: 1024, n_threads: 1, n_gpu_layers: 0 }});
const opened = performance.now() - begun;
const write = async (max_tokens) => {{
  let count = 0, text = "";
  const options = {{ prompt: {prompt}, max_tokens, temperature: 0, ignore_eos: true, stream: true }};
  for await (const one of await model.createCompletion(options)) (count += 1), (text += one.choices?.[0]?.text ?? "");
  return [count, text];
}};
await write(8);
await fetch("found", {{ method: "POST", body: "{{}}" }});
const start = performance.now();
const [count, text] = await write({tokens});
const result = {{ opened, count, text, ms: performance.now() - start }};
"""
PAGE = """<!doctype html><meta charset="utf-8"><script type="module">
try {{
{body}
await fetch("found", {{ method: "POST", body: JSON.stringify(result) }});
}} catch (error) {{
await fetch("found", {{ method: "POST", body: JSON.stringify({{ error: `${{error.stack ?? error}}` }}) }});
}}
</script>"""


class _Handler(SimpleHTTPRequestHandler):
    found: Queue[dict[str, Any]]

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, form: str, *words: Any) -> None: ...


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--package", type=click.Path(path_type=Path, exists=True), default=Path("web/dist"))
@click.option("--wllama", type=click.Path(path_type=Path, exists=True))
@click.option("--gguf", type=click.Path(path_type=Path, exists=True))
@click.option("--tokens", default=64)
@click.option("--turns", default=2)
@click.option("--methods", default="plain,ngram,self-spec")
@click.option("--browser", default="chromium")
def main(bundle: Path, package: Path, wllama: Path | None, gguf: Path | None, tokens: int, turns: int, methods: str,
         browser: str) -> None:  # fmt: skip
    """Print a line of JSON for each engine and method: medians of the turns."""
    pages = {"empty": "const result = { opened: 0 };"}
    for method in methods.split(","):
        pages[method] = EDGESPEC.format(prompt=json.dumps(PROMPT), method=json.dumps(method), tokens=tokens)
    if wllama and gguf:
        pages["wllama"] = WLLAMA.format(prompt=json.dumps(PROMPT), tokens=tokens)
    with tempfile.TemporaryDirectory() as place:
        site = Path(place)
        links = {"edgespec": package, "bundle": bundle, "wllama": wllama, "model.gguf": gguf}
        for name, target in links.items():
            if target:
                (site / name).symlink_to(target.resolve())
        for name, body in pages.items():
            (site / f"{name}.html").write_text(PAGE.format(body=body))
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in pages}
        answers: Queue[dict[str, Any]] = Queue()
        handler = type("Handler", (_Handler,), {"found": answers})
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=place)) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            for _ in range(turns):
                for name in pages:
                    found[name].append(_visit(browser, f"http://127.0.0.1:{server.server_port}/{name}.html", answers))
            server.shutdown()
    empty = statistics.median(one["rss"] for one in found.pop("empty"))
    for name, all_of_them in found.items():
        failed = [one["error"] for one in all_of_them if "error" in one]
        if failed:
            print(json.dumps({"name": name, "error": failed[0]}))
            continue
        said: dict[str, Any] = {"name": name, "isa": all_of_them[0].get("isa"), "text": all_of_them[0]["text"][:60]}
        said["tokens_s"] = round(statistics.median(1000 * one["count"] / one["ms"] for one in all_of_them), 1)
        said["cpu_ms_token"] = round(statistics.median(1000 * one["cpu"] / one["count"] for one in all_of_them), 1)
        said["open_ms"] = round(statistics.median(one["opened"] for one in all_of_them))
        said["memory_mb"] = round((statistics.median(one["rss"] for one in all_of_them) - empty) / 2**20)
        if "module" in all_of_them[0]:
            said["module_mb"] = round(all_of_them[0]["module"] / 2**20)
        print(json.dumps(said))


def _visit(browser: str, address: str, found: Queue[dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as profile:
        words = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
        running = subprocess.Popen([browser, *words, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        largest, spent, end = 0, 0.0, time.monotonic() + 240
        try:
            while time.monotonic() < end:
                largest = max(largest, _resident(profile))
                try:
                    said = found.get(timeout=0.2)
                    if said:
                        return said | {"rss": largest, "cpu": _seconds(profile) - spent}
                    spent = _seconds(profile)  # what follows is timed
                except Empty:
                    continue
            return {"error": "no answer in four minutes", "rss": largest}
        finally:
            running.kill()
            running.wait()
            time.sleep(0.5)  # until its children have ended


def _resident(profile: str) -> int:
    """Add up the resident memory of a browser's processes, with shares of what they share."""
    total = 0
    for process in _processes(profile):
        try:
            fields = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
            total += int(fields["Pss"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            continue
    return total


def _seconds(profile: str) -> float:
    """Add up the processor time of a browser's processes."""
    total = 0
    for process in _processes(profile):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        except (OSError, ValueError):
            continue
    return total / os.sysconf("SC_CLK_TCK")


def _processes(profile: str) -> list[Path]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and profile.encode() in (process / "cmdline").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
