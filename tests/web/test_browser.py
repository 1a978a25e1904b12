"""The npm package and its page in Debian's browsers, without a driver: the page asks a server what to run."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
FAULTY = "pages", "some-pages", "changed", "cut"  # folders that a server has instead of bundle/
SMALL = 'user_pref("dom.quotaManager.temporaryStorage.fixedLimit", 512);\n'  # KiB that Firefox stores
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
        name, how = self.path.rpartition("/")[2], self.path.split("/")[1]
        self.server.downloads[name] += 1
        if how in FAULTY:
            self.faulty(how, name)
        elif name in ("asked", "downloads"):
            body = json.dumps(self.server.asked if name == "asked" else self.server.downloads).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def faulty(self, how: str, name: str) -> None:
        """Answer for a bundle's folder as a server does that has its faults."""
        file = Path(self.directory) / "bundle" / self.path.split("/", 2)[2]
        weights, there = name == "model.data" and file.parent.name == "bundle", file.is_file()
        if how == "pages" or (how == "some-pages" and (not there or name == "chat_template.jinja")):
            file = Path(self.directory) / "driver.html"
        elif not there:
            return self.send_error(404)
        content = file.read_bytes()
        if how == "changed" and weights:
            content = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", self.guess_type(file))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if how == "cut" and weights else content)
        self.close_connection = True
        return None

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", "*")  # for the page of another server
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
    for page in ("driver.html", "faults.html"):
        shutil.copy(HERE / page, folder)
    (folder / "even.js").write_text(
        "export default (prefix, allowed) => allowed.forEach((_, token) => token % 2 && (allowed[token] = 0));\n"
    )
    for page in ("index.html", "drafts.html"):
        shutil.copy(ROOT / "examples" / "web" / page, folder)
    return folder


@pytest.fixture
def server(site: Path) -> Iterator[Server]:
    with Server(site) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def tokens(rounds: list[Any]) -> list[int]:
    return [token for one in rounds for token in one["tokens"]]


def run(name: str, server: Server, page: str, folder: Path, preferences: str = "") -> dict[str, Any]:
    """Open a page in a browser with a new profile -> what it found."""
    (folder / "profile").mkdir()
    (folder / "profile" / "user.js").write_text(preferences)
    words = [word.format(profile=folder / "profile") for word in BROWSERS[name]]
    address = f"http://127.0.0.1:{server.server_port}/{page}"
    quiet = subprocess.DEVNULL
    running = subprocess.Popen([name, *words, address], start_new_session=True, stdout=quiet, stderr=quiet)
    try:
        found = server.found.get(timeout=300)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert "error" not in found, found["error"]
    return found


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
    found = run(name, server, "driver.html", tmp_path)
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
        assert result.text.startswith(found["drafts"]["text"])
        assert "".join(one["text"] for one in found["stopped"]) == result.text[: result.text.index(stop)]
        assert found["stopped"][-1]["finish"] == "stop text"
    assert found["drafts"]["accepted"] + found["drafts"]["refused"]  # as many as time allows
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


@pytest.mark.parametrize("name", BROWSERS)
def test_what_goes_wrong(name: str, server: Server, site: Path, tmp_path: Path) -> None:
    """Errors say what was expected, and what goes wrong once does no harm to the next text."""
    need(name, "to open the page in")
    server.isolated = True
    with load(site / "bundle", threads=1) as engine:
        result = engine.generate(PROMPT, method="ar", max_new_tokens=TOKENS, ignore_eos=True)
    settings = {"maxNewTokens": TOKENS, "ignoreEos": True, "method": "plain"}
    with Server(site) as other:  # with the package, as a network for such files
        other.isolated = True
        Thread(target=other.serve_forever, daemon=True).start()
        package = f"http://127.0.0.1:{other.server_port}/edgespec/index.js"
        server.asked = {"prompt": PROMPT, "settings": settings, "package": package, "patience": 240_000}
        small = SMALL if name.startswith("firefox") else ""
        found = run(name, server, "faults.html", tmp_path, small)
        other.shutdown()
    for asked, code, words in (
        ("pages", "no file", "answers with a page"), ("changed", "refused", "model.data: damaged"),
        ("cut", "network", "model.data"), ("unreachable", "network", "can be reached"),
        ("aborted", "cancelled", ""), ("abortedBefore", "cancelled", ""), ("noTemplate", "refused", "no chat template"),
        ("noScript", "broken", "dist/"), ("prompt", "cancelled", "cancelled"), ("noModules", "no file", "nothing/"),
    ):  # fmt: skip
        assert found[asked].get("code") == code, (asked, found[asked])
        assert found[asked]["name"] == "EdgespecError", (asked, found[asked])
        assert words in found[asked]["error"], (asked, found[asked])
    assert found["promptRounds"] == 0
    assert found["threads"] == 2  # of the package of another server
    plain = tokens(found["texts"][0])
    assert len(plain) == TOKENS
    assert [tokens(one) for one in found["texts"]] == [plain] * 5
    if found["exactness"] == EXACT:
        assert plain == list(result.tokens)
    if small:  # weights were not kept, and nothing failed
        assert found["stored"] < 512_000
        assert found["downloads"]["model.data"] > 8
    else:
        assert found["stored"] > 1_000_000


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
