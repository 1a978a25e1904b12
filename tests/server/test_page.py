"""The page at ``/`` as it is served: files, headers, and what files may not hold (in a browser: test_browser.py)."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from edgespec.server.app import Access, make_app
from edgespec.server.web import FOLDER
from tests.server.conftest import models_of, start, stop

VENDOR = FOLDER / "vendor"
FILES = {
    path.relative_to(FOLDER).as_posix(): path.read_text("utf-8")
    for path in FOLDER.rglob("*")
    if path.is_file() and path.suffix not in (".md", ".LICENSE")
}
OWN = [name for name in sorted(FILES) if not name.startswith("vendor/")]
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def client(chat_bundle: Path) -> Iterator[TestClient]:
    app = make_app(models_of(chat_bundle, "chatty"), access=Access(["a key"]))
    with TestClient(app, base_url="http://localhost:8000") as made:
        yield made


@pytest.mark.parametrize("name", sorted(FILES))
def test_each_file_is_served_without_a_key(client: TestClient, name: str) -> None:
    where = "/" if name == "index.html" else f"/page/{name}"
    answer = client.get(where)
    assert (answer.status_code, answer.text) == (200, FILES[name])
    assert answer.headers["content-type"] == KINDS[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    closed = ("default-src", "frame-ancestors", "base-uri", "form-action", "trusted-types")
    assert dict.fromkeys(closed, "'none'").items() <= rules.items()
    own = ("script-src", "style-src", "connect-src", "img-src")
    others = {"media-src": "data:", "require-trusted-types-for": "'script'"}
    assert dict.fromkeys(own, "'self'") | others == {name: rule for name, rule in rules.items() if name not in closed}
    tag = answer.headers["etag"]
    again = client.get(where, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]
    assert client.get(where, headers={"If-None-Match": '"other"'}).status_code == 200
    head = client.head(where)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


def test_what_guards_the_server_guards_its_page(client: TestClient) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.post("/", json={}).status_code == 405
    for other in ("/page/", "/page/nothing.js", "/page/../web.py", "/page/%2e%2e/web.py", "/index.html",
                  "/page/vendor/README.md"):  # fmt: skip
        assert client.get(other).status_code == 404
    assert client.get("/v1/models").status_code == 401


def test_a_model_says_whether_it_is_made_for_chats(client: TestClient) -> None:
    (model,) = client.get("/v1/models", headers={"Authorization": "Bearer a key"}).json()["data"]
    assert model["edgespec"]["chat"] is True


def test_the_page_can_be_switched_off(chat_bundle: Path) -> None:
    app = make_app(models_of(chat_bundle, "chatty"), page=False)
    with TestClient(app, base_url="http://localhost:8000") as client:
        assert [client.get(path).status_code for path in ("/", "/page/main.js", "/health")] == [404, 404, 200]


@pytest.mark.parametrize(
    "options, said", [((), "; a page to talk to it at {url}/"), (("--no-page", "--api-key", "secret"), "")]
)
def test_the_command_says_where_it_is(chat_bundle: Path, options: tuple[str, ...], said: str) -> None:
    """And that others reach it, where it asks for no key."""
    running = start(chat_bundle, "--host", "0.0.0.0", *options)
    try:
        assert running.said.startswith("warning: everyone who reaches 0.0.0.0 may use this server") == (not options)
        command = [sys.executable, "-c", "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).status)"]
        got = subprocess.run([*command, f"{running.url}/"], capture_output=True, text=True, check=False)
        assert got.stdout.strip() == ("200" if said else "")
        assert running.said.endswith(f"(Ctrl-C stops){said.format(url=running.url)}\n")
    finally:
        stop(running)


SINKS = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment"
)


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith((".js", ".html", ".css"))])
def test_no_file_turns_text_into_markup_or_asks_others(name: str) -> None:
    """The policy would stop it in browsers that know it; the files must not need that."""
    text = FILES[name]
    assert not re.search(SINKS, text)
    assert not re.findall(r"[\"'(]\s*(?:https?:)?//[a-z0-9]", text.replace('"https://"', "").replace('"http://"', ""))
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|@import|url\(", text)


def test_what_files_name_is_there() -> None:
    html = FILES["index.html"]
    assert set(re.findall(r'(?:src|href)="page/([^"]+)"', html)) <= FILES.keys()
    scripts = {name: text for name, text in FILES.items() if name.endswith(".js")}
    for text in scripts.values():
        assert set(re.findall(r'(?:from |import\()"\./([^"]+)"', text)) <= FILES.keys()
    ids = set(re.findall(r'\sid="([^"]+)"', html))
    used = {name for text in scripts.values() for name in re.findall(r'byId\("([^"]+)"\)', text)}
    assert used
    assert used <= ids
    pointed = re.findall(r'(?:for|aria-controls|aria-describedby|aria-labelledby)="([^"]+)"', html)
    assert {one for names in pointed for one in names.split()} <= ids


def test_files_of_others_are_those_of_the_table() -> None:
    """Unchanged releases with their licenses, small enough to be read at once, and no other files."""
    rows = (VENDOR / "README.md").read_text("utf-8").splitlines()[7:]
    table = {cells[0]: cells for row in rows if (cells := [cell.strip() for cell in row.strip("| ").split("|")])}
    assert table.keys() | {"README.md"} == {path.name for path in VENDOR.iterdir()}
    for name, (_, _, version, license_name, digest) in table.items():
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
        if name.endswith(".mjs"):
            assert version.encode() in content[:200]
        else:
            assert license_name.split("-")[0] in ("MIT", "BSD")
    assert {name.split(".")[0] for name in table if name.endswith(".LICENSE")} == {name.split(".")[0] for name in table}
    assert sum(path.stat().st_size for path in VENDOR.glob("*.mjs")) < 260_000


def test_licenses_of_bundled_files_go_along() -> None:
    about = (FOLDER.parents[2] / "pyproject.toml").read_text("utf-8")
    declared = re.search(r'^license = "(.+?)"', about, re.M)
    assert declared
    named = {line.split("|")[4].strip() for line in (VENDOR / "README.md").read_text("utf-8").splitlines()[7:]}
    assert named <= set(declared[1].split(" AND "))
    assert '"edgespec/server/page/vendor/*.LICENSE"' in about
