"""Pictures of the server's page, of a real browser over a real server: light, dark, and as wide as a phone.

    python -m tools.make_page_pictures docs/guides

Needs `pip install -e '.[dev,browser]'` and Debian's chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from tests.server.conftest import TEMPLATE
from tests.server.page.conftest import always_guess, ask, serving, short

MODEL, DRAFT = "builtin:shakespeare", "builtin:shakespeare-draft"
QUESTION = "Good night, good night! Parting is such sweet sorrow."
COLOURS = 64  # of a picture
WIDE: dict[str, Any] = {"viewport": {"width": 1100, "height": 680}}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 680}, "has_touch": True}
PICTURES = {
    "page-light": WIDE | {"color_scheme": "light"},
    "page-dark": WIDE | {"color_scheme": "dark"},
    "page-phone": PHONE | {"color_scheme": "light"},
}


def bundle(folder: Path) -> Path:
    """Export the embedded model with a chat template and its draft model."""
    source = folder / resolve(MODEL).name
    shutil.copytree(resolve(MODEL), source)
    own = json.loads((source / "tokenizer_config.json").read_text("utf-8")) | {"chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(own), "utf-8")
    export_model(
        ExportOptions(str(source), folder / "bundle", ["speculative"], "int4", draft=DRAFT, quick=True), golden=False
    )
    return folder / "bundle"


def draw(page: Any) -> bytes:
    """Talk, with guesses shown -> the picture as a PNG of few colors."""
    narrow = page.viewport_size["width"] < 700
    always_guess(page)
    short(page, 28 if narrow else 52)
    page.check("#show-drafts")
    page.select_option("#method", "speculative")
    if narrow:
        page.keyboard.press("Escape")
    ask(page, QUESTION)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    kept = io.BytesIO()
    shot.quantize(COLOURS, dither=Image.Dither.NONE).save(kept, "PNG", optimize=True)
    return kept.getvalue()


def main() -> None:
    """Draw all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    with (
        tempfile.TemporaryDirectory() as made,
        serving(bundle(Path(made)), "--name", "shakespeare-73m") as served,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, options in PICTURES.items():
            page = browser.new_page(**options)
            page.goto(f"{served.url}/")
            page.locator("#method option[value=speculative]").wait_for(state="attached")
            picture = draw(page)
            (output / f"{name}.png").write_bytes(picture)
            print(f"{output / name}.png: {len(picture)} bytes")
        browser.close()


if __name__ == "__main__":
    main()
