"""The site builds without a warning, and links from pages outside it lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.app import COMMANDS
from tests.docs.conftest import NAMES, ROOT, text_of
from tools.docs_pages import TOP_PAGES, commands_page


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs edgespec[docs]")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "reference/commands/index.html").read_text("utf-8")
    assert all(f"edgespec {name}" in shown for name in COMMANDS)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    users = {page for page in pages if not page.startswith("dev/")}
    assert listed == users | {"reference/commands.md", *TOP_PAGES.values()}


def test_pages_keep_their_limits() -> None:
    words = {True: 0, False: 0}
    for path in (ROOT / "docs").rglob("*.md"):
        words["dev" in path.parts] += len(path.read_text("utf-8").split())
    assert words[True] <= 20_000, (
        f"docs/dev has {words[True]} words: current figures, short entries; Git keeps the rest"
    )
    assert words[False] <= 45_000, f"pages for users have {words[False]} words: merge or shorten"


def test_the_page_of_commands_has_every_option() -> None:
    page = commands_page()
    for name in ("--set", "--max-new-tokens", "--self-distill", "`--no-strict`"):
        assert name.strip("`") in page


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", text)).strip().lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", NAMES)
def test_links(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if file == ROOT / "docs/reference/commands.md":
            continue
        assert file.exists(), f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page}: {target}"


@pytest.mark.parametrize("page", [page for page in NAMES if not page.startswith("docs/dev/")])
def test_speed_ups_of_user_pages_are_measured(page: str) -> None:
    measured = text_of("docs/dev/measurements.md")
    found = set(re.findall(r"\b(\d+\.\d\d?)x", text_of(page)))
    for figure in found:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", measured), f"{figure}x is not in measurements.md"


def test_the_readme_is_short_and_promises_a_speed() -> None:
    assert re.search(r"\b\d+\.\d\dx", text_of("README.md"))
    assert len(text_of("README.md").splitlines()) <= 150
