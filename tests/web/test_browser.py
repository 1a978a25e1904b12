"""The npm package and its page in Debian's browsers, without a driver: the page asks a server what to run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from benchmarks import browser
from edgespec.engine.exactness import EXACT
from edgespec.engine.loading import load
from tests.support.required import need
from tools.build_web import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("native")]
HERE = Path(__file__).parent
TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one.role | upper }}: {{ one.content }}\n{% endfor %}ROMEO:"
MESSAGES = [{"role": "user", "content": "What light is this?"}]
PROMPT, TOKENS = "My lord,", 48
BROWSERS = {
    "chromium": ("--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir={profile}"),
    "firefox-esr": ("--headless", "--no-remote", "--profile", "{profile}"),
}


class Server(ThreadingHTTPServer):
    """Serves a folder, what a page is to run, and takes what it found."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.asked: dict[str, Any] = {}
        self.isolated = False
        self.found = Queue[dict[str, Any]]()
        self.downloads = Counter[str]()


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.downloads[name] += 1
        if name in ("asked", "downloads"):
            body = json.dumps(self.server.asked if name == "asked" else self.server.downloads).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def end_headers(self) -> None:
        if self.server.isolated:  # pages may share memory with their workers
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def do_POST(self) -> None:
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, form: str, *words: Any) -> None: ...


@pytest.fixture(scope="module")
def site(package: Path, bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a page's folder: the package, and a bundle with a chat template."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "edgespec").symlink_to(package)
    shutil.copytree(bundles("native", "int4"), folder / "bundle")
    (folder / "bundle" / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copy(HERE / "driver.html", folder)
    (folder / "even.js").write_text(
        "export default (prefix, allowed) => allowed.forEach((_, token) => token % 2 && (allowed[token] = 0));\n"
    )
    shutil.copy(ROOT / "examples" / "web" / "index.html", folder)
    return folder


@pytest.fixture
def server(site: Path) -> Iterator[Server]:
    with Server(site) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def tokens(rounds: list[Any]) -> list[int]:
    return [token for one in rounds for token in one["tokens"]]


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("name", BROWSERS)
def test_the_package(name: str, isolated: bool, server: Server, site: Path, tmp_path: Path) -> None:
    need(name, "to open the page in")
    server.isolated = isolated
    settings = {"maxNewTokens": TOKENS, "ignoreEos": True, "guesses": 4, "fixed": True}
    texts = [{"prompt": PROMPT, "settings": settings | {"method": method}}
             for method in ("plain", "ngram", "speculative")]  # fmt: skip
    rendered = f"USER: {MESSAGES[0]['content']}\nROMEO:"
    with load(site / "bundle", threads=1) as engine:
        result = engine.generate(PROMPT, method="ar", max_new_tokens=TOKENS, ignore_eos=True)
        answered = engine.generate(rendered, method="ar", max_new_tokens=256)
    stop = result.text[len(result.text) // 2 :][:3]
    server.asked = {"texts": texts, "messages": MESSAGES, "settings": settings, "answer": answered.text, "stop": stop,
                    "threads": 2 if isolated else None, "patience": 240_000}  # fmt: skip
    (tmp_path / "profile").mkdir()
    words = [word.format(profile=tmp_path / "profile") for word in BROWSERS[name]]
    address = f"http://127.0.0.1:{server.server_port}/driver.html"
    running = subprocess.Popen([name, *words, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = server.found.get(timeout=300)
    finally:
        running.kill()
        running.wait()
    assert "error" not in found, found["error"]
    facts = found["facts"]
    assert facts["exactness"] == (EXACT if facts["isa"] == "relaxed" else "near-ties may differ")
    assert name != "chromium" or facts["isa"] == "relaxed"
    assert facts["threads"] == (2 if isolated else 1)
    assert found["threads"].get("value") == (3 if isolated else None)
    assert isolated or "cross-origin isolated" in found["threads"]["error"]
    assert found["done"] == 1
    plain = tokens(found["texts"][0])
    for rounds in (*found["texts"], found["after"], found["again"]):
        assert tokens(rounds) == plain
        assert "".join(one["text"] for one in rounds).startswith("".join(one["text"] for one in found["texts"][0]))
    assert sum(one["accepted"] for one in found["texts"][2]) > 0
    if facts["exactness"] == EXACT:
        assert plain == list(result.tokens)
        assert "".join(one["text"] for one in found["texts"][0]) == result.text
        assert answered.text.strip() in found["page"]
        assert "".join(one["text"] for one in found["stopped"]) == result.text[: result.text.index(stop)]
        assert found["stopped"][-1]["finish"] == "stop text"
    assert len(tokens(found["chat"])) == found["counts"]["tokens"] == TOKENS
    assert found["cancelled"]["code"] == "cancelled"
    assert (found["refused"]["code"], found["refused"]["name"]) == ("refused", "EdgespecError")
    assert found["nothing"]["code"] == "no file"
    assert all(token % 2 == 0 for token in tokens(found["even"]))
    assert "nothing.js" in found["noMask"]["error"]
    assert "address of a script" in found["ownMask"]["error"]
    assert [one["code"] for one in found["waiting"]] == ["cancelled"] * 2
    assert [one["code"] for one in found["closed"]] == ["cancelled", "refused", "refused"]
    assert found["restored"] > 0
    assert found["kept"]["model.data"] == 2  # once for the target and once for the draft: the second page read its own


def test_the_benchmark(package: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("chromium", "to measure in")
    words = [str(package), str(site / "bundle"), "--methods", "plain,speculative", "--runs", "1", "--tokens", "8"]
    assert browser.main([*words, "--prompt", PROMPT, "--json"]) == 0
    shown = capsys.readouterr().out
    table, figures = shown.split("{", 1)
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| edgespec, plain", "| edgespec, speculative"]
    found = json.loads("{" + figures)
    weights = sum(file.stat().st_size for file in (site / "bundle").rglob("*.data"))
    for (run,) in found["figures"].values():
        assert run["facts"]["threads"] == 2
        assert run["long"]["tokens"] - run["short"]["tokens"] == 8
        assert weights <= run["facts"]["memory"] <= weights + 150_000_000
        assert weights <= run["sent"]["model"] <= weights + 5_000_000
        assert 0 < run["peak"] - found["empty"] < weights + 150_000_000
