"""Pictures on the page: attached, dropped and pasted, sent as the model reads them, shown in a canvas, not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.audio.conftest import orpheus as orpheus
from tests.images.conftest import PRINT, SAID
from tests.server.conftest import Served
from tests.server.page.conftest import Visit, serving, until
from tests.server.page.test_controls import WIDE, bodies

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("native")]
FILES = """async (name) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 5000, height: 40 });
  canvas.getContext("2d").fillRect(0, 0, 50, 40);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const [pasted, dropped] = [new DataTransfer(), new DataTransfer()];
  pasted.items.add(new File([blob], "pasted.png", { type: "image/png" }));
  dropped.items.add(new File([blob], "dropped.tif", { type: "image/tiff" })); // as kinds that servers do not read
  dropped.items.add(new File([new Uint8Array([255, 0, 1])], "broken.heic", { type: "image/heic" }));
  const paste = new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true });
  document.querySelector("#question").dispatchEvent(paste);
  document.querySelector("#compose").dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, bubbles: true }));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page") / "reader"
    export_model(ExportOptions("builtin:reader", folder, [], "int8", threads=1, quick=True), golden=False)
    with serving(folder, "--name", "reader") as running:
        yield running


def test_pictures_go_along(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **WIDE)
    sent = bodies(page)
    until(page, "document.querySelector('#attach').textContent === 'Attach files'")
    page.select_option("#sampling", "greedy")
    page.set_input_files("#attach-files", [PRINT / "line.png"])
    page.get_by_role("button", name="Remove line.png").wait_for()
    until(page, "document.querySelector('#files canvas')?.width === 240")
    page.press("#question", "Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    assert SAID["line"] in page.text_content(".message.assistant")
    (part,) = sent[0]["messages"][0]["content"]
    assert part["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    page.evaluate(FILES)
    until(page, "document.querySelector('#alert').textContent.includes('broken.heic')")
    assert page.locator("#files button").all_text_contents() == ["pasted.png ×"]  # of a drop all or none
    page.fill("#question", "Read this.")
    page.press("#question", "Enter")
    page.wait_for_selector(".message.assistant:nth-child(4)[aria-busy=false]")
    first, _, last = sent[1]["messages"]
    assert first["content"] == [part]
    assert [one["type"] for one in last["content"]] == ["image_url", "text"]
    page.reload()  # they are kept with the conversation
    until(page, "document.querySelectorAll('.message canvas').length === 2")
    page.get_by_role("img", name="pasted.png").wait_for()


def test_what_a_model_draws_is_shown(visit: Visit, tmp_path: Path) -> None:
    export_model(ExportOptions("builtin:glyphs", tmp_path / "glyphs", [], "int8", threads=1, quick=True), golden=False)
    with serving(tmp_path / "glyphs", "--name", "painter") as served:
        page = visit(served, **WIDE)
        until(page, "document.querySelector('#question-label').textContent === 'What to draw'")
        page.fill("#question", "A")
        page.press("#question", "Enter")
        until(page, "document.querySelector('.assistant canvas.picture')?.width === 32")
        page.wait_for_selector(".message.assistant[aria-busy=false]")
        assert page.text_content(".message.assistant .problem") == ""


def test_what_a_model_says_is_played(visit: Visit, orpheus: Path) -> None:
    with serving(orpheus, "--name", "voice") as served:
        page = visit(served, **WIDE)
        until(page, "document.querySelector('#question-label').textContent === 'What to say'")
        page.fill("#question", "well then")
        page.press("#question", "Enter")
        until(page, "document.querySelector('.assistant audio')?.duration > 0.01")
        page.evaluate("document.querySelector('.assistant audio').play()")
        until(page, "document.querySelector('.assistant audio').currentTime > 0.01")
        page.reload()  # it is kept with the conversation
        until(page, "document.querySelector('.assistant audio')?.duration > 0.01")
