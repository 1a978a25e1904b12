"""Accessibility of the page: in Korean, from right to left, by keyboard, by screen reader, in the dark, on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.page.conftest import Visit, ask, short, until

pytestmark = pytest.mark.nightly

WIDE = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
KOREAN = "안녕하세요, 로미오!"
HEBREW, ARABIC = "שלום עולם", "مرحبا بالعالم"
MANY = (
    "# A title\n\nA paragraph with **strong**, *soft* and `code`, and a word" + "x" * 200 + ".\n\n"
    "- one\n- two\n  1. deep\n\n> a quote\n\n| a | b |\n|---|---|\n| 1 | " + "wide" * 80 + " |\n\n"
    "```python\nprint('" + "long" * 80 + "')\n```\n\n---\n\n[a link](https://example.com/) " + HEBREW + "\n"
)


def carry(page: Any, folder: Path, *texts: str) -> None:
    """Import a conversation whose answers are these texts."""
    messages: list[dict[str, Any]] = []
    for text in texts:
        messages.append({"role": "user", "text": "Write!", "files": [{"name": "a.txt", "text": "a " * 100}]})
        pieces = [["accepted", "green "], ["refused", "red "], ["own", "own"]]
        messages.append({"role": "assistant", "text": text, "pieces": pieces, "finish": "length"})
    kept = {"format": "edgespec-conversation", "version": 1, "title": "Carried", "messages": messages}
    (folder / "carried.json").write_text(json.dumps(kept), "utf-8")
    page.set_input_files("#import-file", folder / "carried.json")
    page.locator(".message.assistant").last.wait_for()


def test_korean_is_composed_and_sent_whole(visit: Visit, server: Served) -> None:
    """The Enter that ends a composition belongs to the input method: nothing is sent, and no syllable comes twice."""
    page = visit(server, **WIDE)
    short(page, 8)
    keys = page.context.new_cdp_session(page)
    page.evaluate("addEventListener('keydown', (event) => (window.composing = event.isComposing), true)")
    for place, shown in (("#question", 2), ("textarea[aria-label='Edit the message']", 2)):
        if place == "#question":
            page.focus(place)
        else:
            page.locator(".message.user").get_by_role("button", name="Edit").click()
            page.fill(place, "")
        before = page.locator(".message").count()
        page.keyboard.insert_text(KOREAN[:-1])
        for part in ("ㅎ", "하", "한"):
            keys.send("Input.imeSetComposition", {"text": part, "selectionStart": 1, "selectionEnd": 1})
        enter = {"type": "rawKeyDown", "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        keys.send("Input.dispatchKeyEvent", enter)
        keys.send("Input.dispatchKeyEvent", enter | {"type": "keyUp"})
        assert page.evaluate("window.composing")
        assert page.locator(".message").count() == before
        keys.send("Input.insertText", {"text": "한"})  # what the input method commits
        page.evaluate(  # Safari: the composition has ended, and its key comes after that
            f"""document.querySelector({json.dumps(place)}).dispatchEvent(
              new KeyboardEvent("keydown", {{ key: "Enter", keyCode: 229, bubbles: true, cancelable: true }}))"""
        )
        assert page.locator(".message").count() == before
        assert page.input_value(place) == KOREAN[:-1] + "한"
        page.press(place, "Enter")
        page.locator(".message.assistant[aria-busy=false]").wait_for()
        assert page.locator(".message").count() == shown
        assert page.locator(".message.user .text").text_content() == KOREAN[:-1] + "한"


def test_right_to_left_text_is_written_so(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **WIDE)
    short(page, 8)
    direction = "(one) => getComputedStyle(one).direction"
    page.fill("#question", HEBREW)
    assert page.locator("#question").evaluate(direction) == "rtl"
    ask(page, HEBREW)
    assert page.locator(".message.user .raw").evaluate(direction) == "rtl"
    assert page.locator("#list .open").evaluate(direction) == "rtl"
    carry(page, tmp_path, f"{ARABIC}\n\nLeft to right\n\n- {HEBREW}\n\n```\n{ARABIC}\n```")
    blocks = page.locator(".message.assistant > .text > *")
    assert [blocks.nth(at).evaluate(direction) for at in range(4)] == ["rtl", "ltr", "ltr", "ltr"]
    assert page.locator(".message.assistant .text li").evaluate(direction) == "rtl"
    assert blocks.nth(3).locator("pre").text_content() == ARABIC


FOCUSED = """() => {
  const one = document.activeElement, style = getComputedStyle(one);
  const box = one.getBoundingClientRect();
  const name = one.getAttribute("aria-label") || one.labels?.[0]?.textContent || one.textContent;
  const seen = box.bottom > 0 && box.right > 0 && box.top < innerHeight && box.left < innerWidth;
  return { id: one.id, name: name.trim(), ring: parseFloat(style.outlineWidth), style: style.outlineStyle, seen };
}"""


def tabs(page: Any, end: str, key: str = "Tab") -> list[dict[str, Any]]:
    """Press a key until an element has the focus -> all that had it."""
    found = []
    for _ in range(60):
        page.keyboard.press(key)
        found.append(page.evaluate(FOCUSED))
        if end in (found[-1]["id"], found[-1]["name"]):
            return found
    raise AssertionError(f"{end} was never reached: {[one['name'] for one in found]}")


def test_a_keyboard_is_enough(visit: Visit, server: Served) -> None:
    """From the skip link through every control; each has a name, is in view, and shows that it has the focus."""
    page = visit(server, **WIDE)
    tabs(page, "Skip to the message box", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    short(page, 8)
    page.focus("#question")
    page.keyboard.type(KOREAN)
    page.keyboard.press("Enter")
    page.locator(".message.assistant[aria-busy=false]").wait_for()
    assert page.evaluate("document.activeElement.id") == "question"  # ready for the next question
    tabs(page, "Skip to the message box", "Shift+Tab")
    path = tabs(page, "theme")
    order = [one["id"] or one["name"] for one in path]
    expected = ["open-conversations", "open-settings", "new", KOREAN, f"Delete {KOREAN}", "export-markdown", "import",
                "log", "Edit", "Regenerate", "question", "attach", "send", "show-drafts", "method",
                "sampling", "theme"]  # fmt: skip
    assert [one for one in order if one in expected] == expected
    for one in path:
        assert one["name"], one
        assert one["seen"], one
        assert one["ring"] >= 2, one
        assert one["style"] == "solid", one
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert not page.is_visible("#settings")
    assert page.get_attribute("#open-settings", "aria-expanded") == "false"
    page.keyboard.press("Space")
    page.focus("#method")
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.locator(".message").get_by_role("button", name="Regenerate").focus()
    page.keyboard.press("Enter")
    page.locator(".message.assistant[aria-busy=false]").wait_for()
    assert page.evaluate("document.activeElement.id") == "question"


def test_the_button_that_goes_hands_its_focus_on(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    short(page, 900)
    slow = page.context.new_cdp_session(page)
    slow.send("Network.enable")
    limits = {"offline": False, "latency": 0, "uploadThroughput": -1, "downloadThroughput": 6000}
    slow.send("Network.emulateNetworkConditions", limits)
    page.fill("#question", "Speak")
    page.focus("#send")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop")
    page.focus("#stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send")
    assert page.evaluate("document.activeElement.id") == "question"


def test_a_screen_reader_is_told(visit: Visit, server: Served) -> None:
    """That an answer is written, and then the answer: once, not word by word."""
    page = visit(server, **WIDE)
    short(page)
    page.evaluate(
        """() => {
          window.told = [];
          const watch = new MutationObserver(() => told.push(document.querySelector("#status").textContent));
          watch.observe(document.querySelector("#status"), { childList: true });
        }"""
    )
    ask(page, "Speak")
    assert page.evaluate("told")[0] == "The model is answering"
    assert page.evaluate("told.length") == 2
    assert page.evaluate("told")[1].split() == page.locator(".message.assistant > .text").inner_text().split()
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert set(live.evaluate_all("all => all.map((one) => one.id)")) == {"alert", "status", "key-wrong", "none-found"}


def test_a_phone_shows_all_without_scrolling_sideways(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **PHONE)
    fits = "document.documentElement.scrollWidth <= 360 && document.querySelector('#log').scrollWidth <= 360"
    assert page.evaluate(fits)
    assert not page.is_visible("#conversations")
    carry(page, tmp_path, MANY)
    for name in ("conversations", "settings"):
        page.tap(f"#open-{name}")
        assert page.is_visible(f"#{name}")
        assert page.evaluate(fits)
        assert page.evaluate(f"document.querySelector('#{name}').scrollWidth <= 360")
    assert not page.is_visible("#conversations")  # one at a time
    page.select_option("#sampling", "custom")
    assert page.evaluate(fits)
    page.fill("#max_tokens", "8")
    page.check("#show-drafts")
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    page.fill("#question", "word " * 60)
    assert page.evaluate(fits)
    page.tap("#send")
    page.locator(".message.assistant[aria-busy=false]").nth(1).wait_for()
    assert page.evaluate(fits)
    for name in ("#send", "#question", "#attach", "#open-settings"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 740
        assert box["height"] >= 36
    page.tap("#open-conversations")
    page.tap("#new")
    assert not page.is_visible("#conversations")
    assert page.locator(".message").count() == 0


def test_colors_follow_the_system_or_the_picker(visit: Visit, server: Served) -> None:
    page = visit(server, color_scheme="dark", **WIDE)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
    assert page.evaluate(ground) == dark
    short(page)
    page.select_option("#theme", "light")
    assert page.evaluate(ground) == light
    page.reload()
    page.wait_for_selector("#method option", state="attached")
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="light")
    page.select_option("#theme", "dark")
    assert page.evaluate(ground) == dark
    page.select_option("#theme", "system")
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_serious(
    visit: Visit, server: Served, tmp_path: Path, scheme: str, device: dict[str, Any]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(server, color_scheme=scheme, **device)

    def check(what: str) -> None:
        found = Axe().run(page).response["violations"]
        bad = [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found]
        assert [one for one in bad if one[1] in ("serious", "critical")] == [], what

    check("as it opens")
    carry(page, tmp_path, MANY, "A second answer")
    check("Markdown")
    page.locator(".attached summary").first.click()
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    check("a message that is edited")
    page.locator(".message.user").first.get_by_role("button", name="Cancel").click()
    for name in ("conversations", "settings"):
        if not page.is_visible(f"#{name}"):
            page.click(f"#open-{name}")
        check(name)
    page.check("#show-drafts")
    page.select_option("#sampling", "custom")
    page.fill("#temperature", "-1")
    check("settings")
    if device is PHONE:
        page.keyboard.press("Escape")
    (tmp_path / "a.png").write_bytes(b"\xff\x00")
    page.set_input_files("#attach-files", tmp_path / "carried.json")
    page.get_by_role("button", name="Remove carried.json").wait_for()
    page.set_input_files("#attach-files", tmp_path / "a.png")
    until(page, "document.querySelector('#alert').textContent !== ''")
    check("guesses, a file and a complaint")
    page.fill("#question", "Speak")
    page.press("#question", "Enter")
    until(page, "document.querySelectorAll('.problem:not(:empty)').length > 0")
    check("a problem")
