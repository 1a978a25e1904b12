"""The judgement as a page: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from edgespec.judge.judging import WORDS, Judgement, speed
from edgespec.runtimes.files.staged import write_staged
from edgespec.version import __version__


def write_page(file: Path, found: Judgement) -> None:
    """Write the page.

    Raises:
        OSError: it cannot be written.
    """
    import jinja2

    source = (resources.files("edgespec.judge") / "page.html.jinja").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    differences = [(item.what, one) for item in found.greedy for one in item.differences]
    page = template.render(found=found, differences=differences, words=WORDS, speed=speed, version=__version__)
    write_staged(file, page.encode("utf-8", "replace").decode("utf-8"))
