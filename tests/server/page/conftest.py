"""The page in a real browser, over a real server.  A test fails where its page asked others, or broke the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.server.conftest import Served, start, stop
from tests.support.required import need

CHROMIUM = "chromium"
WAIT = 60_000  # milliseconds to wait for a condition: other tests run at the same time


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start Debian's Chromium, without a window."""
    need(CHROMIUM, "to open the page in")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.skip("playwright is not installed: pip install 'edgespec[browser]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_bundle(chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the embedded model with a chat template and its draft model."""
    folder = tmp_path_factory.mktemp("page") / "bundle"
    source = str(chat_bundle.parent / "model")
    draft = "builtin:shakespeare-draft"
    export_model(ExportOptions(source, folder, ["speculative"], "int4", draft=draft, threads=1), golden=False)
    return folder


@contextmanager
def serving(bundle: Path, *options: str) -> Iterator[Served]:
    running = start(bundle, *options)
    try:
        yield running
    finally:
        stop(running)


@pytest.fixture(scope="session")
def server(page_bundle: Path) -> Iterator[Served]:
    with serving(page_bundle, "--name", "chatty") as running:
        yield running


Visit = Callable[..., Any]


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """Open a server's page in a new browser context with empty storage; options are those of Playwright's contexts.

    ``expected``: parts of messages that the browser's console may contain.
    """
    with ExitStack() as stack:

        def opened(served: Served, expected: tuple[str, ...] = (), **options: Any) -> Any:
            context = chromium.new_context(**options)
            context.set_default_timeout(WAIT)
            asked: list[Any] = []
            said: list[str] = []
            context.on("request", lambda request: asked.append(request))
            context.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
            context.on("weberror", lambda error: said.append(f"error: {error.error}"))
            page = context.new_page()
            page.asked = asked
            page.goto(f"{served.url}/")
            if "status of 401" not in expected:
                until(page, "document.querySelector('#model').textContent !== ''")

            def close() -> None:
                # the policy stopped these requests before they were sent
                urls = {one.url for one in asked if one.failure != "csp"}
                context.close()
                assert [one for one in said if not any(part in one for part in expected)] == []
                own = {urlsplit(served.url).netloc, ""}  # none: files that were exported
                assert [url for url in urls if urlsplit(url).netloc not in own] == []

            stack.callback(close)
            return page

        yield opened


def until(page: Any, holds: str) -> None:
    """Wait until an expression of JavaScript holds; Playwright's own way is not allowed by the page's policy."""
    for _ in range(WAIT // 20):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never came: {holds}")


def ask(page: Any, text: str) -> str:
    """Type a question, send it, and wait for the answer -> what is shown of it."""
    before = page.locator(".message.assistant").count()
    page.fill("#question", text)
    page.press("#question", "Enter")
    answer = page.locator(".message.assistant").nth(before)
    answer.and_(page.locator("[aria-busy=false]")).wait_for()
    return str(answer.locator(".text").last.text_content())


def always_guess(page: Any) -> None:
    """Have guesses made for every answer, whatever they cost on this machine."""

    def change(route: Any) -> None:
        body = json.loads(route.request.post_data)
        body["edgespec"]["adaptive"] = False
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)


def short(page: Any, tokens: int = 24) -> None:
    """Make answers short, and always the same."""
    if not page.is_visible("#settings"):
        page.click("#open-settings")
    page.select_option("#sampling", "greedy")
    page.fill("#max_tokens", str(tokens))
