"""Every control of the page works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.server.conftest import Served, with_template
from tests.server.page.conftest import Visit, always_guess, ask, serving, short, until
from tests.server.page.test_reach import PHONE, carry
from tests.server.test_tools import THINKS

pytestmark = pytest.mark.nightly

WIDE = {"viewport": {"width": 1280, "height": 800}}
QUESTION = "Good night, good night!"


def answered(served: Served, messages: list[dict[str, str]], tokens: int = 24) -> str:
    """Ask the API itself -> the greedy text."""
    body = {"model": "chatty", "messages": messages, "temperature": 0, "max_tokens": tokens}
    request = Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bodies(page: Any) -> list[dict[str, Any]]:
    """List the bodies of requests from now on."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda sent: found.append(json.loads(sent.post_data)) if sent.method == "POST" else None)
    return found


def test_a_question_is_answered(visit: Visit, server: Served) -> None:
    """Enter and the button both send, with the whole conversation; Shift+Enter starts a new line."""
    page = visit(server, **WIDE)
    short(page)
    sent = bodies(page)
    first = ask(page, QUESTION)
    assert first.split() == answered(server, [user(QUESTION)]).split()
    page.fill("#question", "And")
    page.press("#question", "Shift+Enter")
    page.type("#question", "now?")
    assert page.input_value("#question") == "And\nnow?"
    page.click("#send")
    page.locator(".message.assistant").nth(1).and_(page.locator("[aria-busy=false]")).wait_for()
    assert page.input_value("#question") == ""
    assert sent[1]["messages"][::2] == [user(QUESTION), user("And\nnow?")]
    assert sent[1]["messages"][1]["role"] == "assistant"
    assert sent[1]["messages"][1]["content"] == answered(server, [user(QUESTION)])
    figures = page.locator(".figures").last.text_content()
    assert "24 tokens" in figures
    assert "tokens/s" in figures
    assert "tokens/round" in figures
    assert page.locator(".reason").last.text_content().startswith("auto: ")
    assert page.text_content("#reason") == page.locator(".reason").last.text_content()
    page.press("#question", "Enter")  # nothing was typed
    assert len(sent) == 2


def test_an_answer_can_be_stopped(visit: Visit, server: Served) -> None:
    """The text so far stays, and the next question is answered; Escape stops as well."""
    page = visit(server, **WIDE)
    short(page, 900)
    slow = page.context.new_cdp_session(page)
    slow.send("Network.enable")
    limits = {"offline": False, "latency": 0, "uploadThroughput": -1}
    for key in ("", "Escape"):
        slow.send("Network.emulateNetworkConditions", limits | {"downloadThroughput": 6000})
        page.fill("#question", QUESTION)
        page.press("#question", "Enter")
        until(page, "[...document.querySelectorAll('.message .text')].at(-1).textContent.length > 20")
        assert not page.is_visible("#send")
        live = page.locator(".figures").last.text_content()
        assert "tokens/round" in live  # while it is written
        page.keyboard.press(key) if key else page.click("#stop")
        page.wait_for_selector("#send")
        assert page.locator(".end").last.text_content() == "stopped"
        assert len(page.locator(".message .text").last.text_content()) > 20
    slow.send("Network.emulateNetworkConditions", limits | {"downloadThroughput": -1})
    with urlopen(f"{server.url}/health") as health:
        assert json.load(health)["running"] <= 1
    short(page, 8)
    assert ask(page, "Speak!")


def test_a_question_is_edited_and_an_answer_made_again(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    short(page)
    for text in (QUESTION, "Speak!", "Go on."):
        ask(page, text)
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    box = page.get_by_label("Edit the message")
    assert box.input_value() == "Speak!"
    box.press("Escape")
    assert page.locator(".message").count() == 6
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Cancel").click()
    sent = bodies(page)
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    box.fill("Be silent!")
    page.get_by_role("button", name="Save and ask again").click()
    page.wait_for_selector(".message.assistant:nth-child(4)[aria-busy=false]")
    assert page.locator(".message").count() == 4
    assert sent[0]["messages"][2] == user("Be silent!")
    assert page.locator(".message.user .text").all_text_contents() == [QUESTION, "Be silent!"]
    page.locator(".message.assistant").first.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".message.assistant:nth-child(2)[aria-busy=false]")
    assert page.locator(".message").count() == 2
    assert sent[1]["messages"] == [user(QUESTION)]
    page.get_by_role("button", name="Earlier version").click()  # with what followed it
    until(page, "document.querySelectorAll('.message').length === 4")
    assert page.locator(".versions").first.text_content() == "‹1 of 2›"
    assert page.locator(".message.user .text").all_text_contents() == [QUESTION, "Be silent!"]
    page.get_by_role("button", name="Later version").click()
    until(page, "document.querySelectorAll('.message').length === 2")
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    box.fill("Another beginning")
    box.press("Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    assert sent[2]["messages"] == [user("Another beginning")]
    assert page.locator("#list .open").all_text_contents() == ["Another beginning"]


def test_earlier_versions_of_an_answer_are_kept(visit: Visit, server: Served) -> None:
    """To and fro, over a reload, an export and an import; what is asked next goes with the one that is shown."""
    page = visit(server, **WIDE)
    short(page, 8)
    page.select_option("#sampling", "custom")
    page.fill("#temperature", "2")
    texts = [ask(page, QUESTION)]
    assert not page.locator(".versions").is_visible()
    for number in (2, 3):
        page.get_by_role("button", name="Regenerate").click()
        until(page, f"document.querySelector('.versions').textContent === '‹{number} of {number}›'")
        page.locator(".message.assistant[aria-busy=false]").wait_for()
        texts.append(str(page.locator(".message.assistant > .text").text_content()))
    assert len(set(texts)) == 3
    page.reload()
    until(page, "document.querySelectorAll('.message').length === 2")
    for name, number in (("Earlier", 2), ("Earlier", 1), ("Later", 2)):
        expected = texts[number - 1]
        page.get_by_role("button", name=f"{name} version").click()
        until(page, f"document.querySelector('.versions').textContent === '‹{number} of 3›'")
        assert page.locator(".message.assistant > .text").text_content() == expected
    sent = bodies(page)
    ask(page, "And?")
    assert sent[0]["messages"][1] == {"role": "assistant", "content": texts[1]}
    with page.expect_download() as saved:
        page.click("#export-json")
    page.click("#new")
    page.set_input_files("#import-file", saved.value.path())
    until(page, "document.querySelectorAll('.message').length === 4")
    page.get_by_role("button", name="Later version").first.click()
    until(page, "document.querySelectorAll('.message').length === 2")
    assert page.locator(".message.assistant > .text").all_text_contents() == [texts[2]]
    page.get_by_role("button", name="Earlier version").click()
    until(page, "document.querySelectorAll('.message').length === 4")
    assert page.get_by_role("button", name="Later version").first.is_enabled()


def test_a_cut_answer_goes_on(visit: Visit, server: Served) -> None:
    """From where it was cut: the two parts are the text that one request would have given."""
    page = visit(server, **WIDE)
    short(page, 12)
    sent = bodies(page)
    first = ask(page, QUESTION)
    page.get_by_role("button", name="Continue").click()
    until(page, "document.querySelector('.figures').textContent.startsWith('24 tokens')")
    page.locator(".message.assistant[aria-busy=false]").wait_for()
    assert sent[1]["continue_final_message"] is True
    assert sent[1]["messages"][1]["content"].split() == first.split()
    whole = answered(server, [user(QUESTION)], 24)
    assert page.locator(".message.assistant > .text").inner_text().split() == whole.split()
    ask(page, "And?")
    assert page.get_by_role("button", name="Continue").count() == 1  # only at the last answer


def test_conversations_are_found_and_named(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    short(page, 8)
    for text in ("Of cabbages", "Of kings"):
        page.click("#new")
        ask(page, text)
    page.fill("#search", "CABB")
    until(page, "document.querySelectorAll('#list li').length === 1")
    page.fill("#search", "nowhere at all")
    until(page, "document.querySelector('#none-found').textContent !== ''")
    page.fill("#search", "")
    until(page, "document.querySelectorAll('#list li').length === 2")
    names = page.locator("#list .open")
    page.get_by_role("button", name="Rename Of kings").click()
    field = page.get_by_label("Name of the conversation")
    assert field.input_value() == "Of kings"
    field.fill("Nothing")
    field.press("Escape")
    until(page, "document.querySelectorAll('#list input').length === 0")
    assert names.all_text_contents() == ["Of kings", "Of cabbages"]
    page.get_by_role("button", name="Rename Of kings").click()
    field.fill("Of queens")
    field.press("Enter")
    until(page, "document.querySelector('#list .open').textContent === 'Of queens'")
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Another question")
    page.get_by_role("button", name="Save and ask again").click()
    page.locator(".message.assistant[aria-busy=false]").wait_for()
    page.reload()
    until(page, "document.querySelectorAll('#list li').length === 2")
    assert names.all_text_contents() == ["Of queens", "Of cabbages"]  # a name that was given stays


def test_code_is_colored_and_copied(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, permissions=["clipboard-read", "clipboard-write"], **WIDE)
    code = "def f(x):\n    return 'a' + 1  # more"
    carry(page, tmp_path, f"```python\n{code}\n```\n\n```nonsense\n1 < 2\n```")
    until(page, "document.querySelectorAll('.hl-keyword').length === 2")
    assert page.locator(".message.assistant pre code").first.text_content() == code
    assert page.locator(".hl-string, .hl-number, .hl-comment").all_text_contents() == ["'a'", "1", "# more"]
    page.get_by_role("button", name="Copy the code").first.click()
    until(page, "[...document.querySelectorAll('.code button')][0].textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert page.locator(".message.assistant pre code").last.text_content() == "1 < 2"
    assert page.locator(".code .hint").all_text_contents() == ["python", "nonsense"]


def test_the_rate_is_the_servers_though_all_pieces_come_at_once(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    short(page)

    def whole(route: Any) -> None:
        response = route.fetch()
        text = re.sub(r'"tokens_per_second": ?[0-9.]+', '"tokens_per_second": 12.3', response.text())
        route.fulfill(response=response, body=text)

    page.route("**/v1/chat/completions", whole)
    ask(page, QUESTION)
    assert "· 12.3 tokens/s ·" in page.locator(".figures").last.text_content()


def test_a_table_keeps_its_words_whole_and_its_columns_aligned(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **PHONE)
    said = "in as many words as it takes to fill the whole width of a phone and then some more"
    carry(page, tmp_path, f"| algorithm | cost | remarks |\n|---|---:|:-:|\n| quicksort | 12 | {said} |\n")
    cells = page.locator(".message td")
    sides = [cells.nth(at).evaluate("(one) => getComputedStyle(one).textAlign") for at in range(3)]
    assert sides == ["start", "end", "center"]
    for at in (0, 1):  # the text of each is one line
        cells.nth(at).evaluate("(one) => getSelection().selectAllChildren(one)")
        assert page.evaluate("getSelection().getRangeAt(0).getClientRects().length") == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pickers_are_what_is_asked_for(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    sent = bodies(page)
    methods = page.locator("#method option").evaluate_all("options => options.map((one) => one.value)")
    assert methods[0] == "auto"
    assert {"speculative", "ngram", "ar"} <= set(methods)
    page.fill("#max_tokens", "12")
    ask(page, "One")
    assert not {"temperature", "seed", "top_p"} & sent[0].keys()
    assert sent[0]["edgespec"] == {"method": "auto", "show_drafts": True}
    chosen = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 12}
    own = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "gamma": 3}
    page.select_option("#sampling", "custom")
    for name, value in (chosen | own).items():
        page.fill(f"#{name}", str(value))
    page.select_option("#method", "speculative")
    page.fill("#system", "Be brief.")
    ask(page, "Two")
    assert sent[1] == sent[1] | chosen
    assert sent[1]["edgespec"] == own | {"method": "speculative", "show_drafts": True}
    assert sent[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert page.locator(".reason").last.text_content().startswith("speculative. asked for")
    page.fill("#temperature", "-1")
    page.fill("#question", "Three")
    page.press("#question", "Enter")
    page.wait_for_selector(".problem:not(:empty)")
    assert "Temperature" in page.locator(".problem").last.text_content()
    assert len(sent) == 2
    page.reload()
    page.wait_for_selector("#method option[value=speculative]", state="attached")
    assert page.input_value("#method") == "speculative"
    assert page.input_value("#top_k") == "5"
    assert page.input_value("#system") == "Be brief."
    page.select_option("#sampling", "greedy")
    assert not page.is_visible("#custom")
    ask(page, "Four")
    assert sent[2]["temperature"] == 0
    assert "seed" not in sent[2]


def test_guesses_are_shown_and_are_the_same_text(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    always_guess(page)
    short(page, 80)
    page.select_option("#method", "speculative")
    ask(page, QUESTION)
    assert page.locator(".message .accepted").count() == 0
    page.check("#show-drafts")  # also in existing answers
    expected = answered(server, [user(QUESTION)], 80)
    joined = page.locator(".message .raw > span").all_text_contents()
    assert "".join(joined) == expected
    assert page.locator(".message .accepted").count() > 0
    assert page.locator(".message del.refused[aria-hidden=true]").count() > 0
    assert page.locator(".message del.refused").count() == page.locator(".message del").count()
    counted = "() => [...document.querySelectorAll('.message .accepted')].map((one) => getComputedStyle(one).color)[0]"
    green = page.evaluate(counted)
    red = page.evaluate(counted.replace(".accepted", ".refused"))
    assert (green, red) == ("rgb(17, 99, 41)", "rgb(164, 14, 38)")
    again = ask(page, QUESTION)  # colored as it comes
    assert again
    assert not page.locator(".counted").last.is_visible()
    page.locator(".figures").last.click()  # a click shows the details
    assert page.locator(".counted").last.is_visible()
    assert "% of" in page.locator(".counted").last.text_content()
    page.uncheck("#show-drafts")
    assert page.locator(".message .accepted").count() == 0
    assert page.locator(".message.assistant > .text").first.inner_text().split() == expected.split()


def test_text_files_go_along(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **WIDE)
    short(page, 8)
    sent = bodies(page)
    notes, other, picture = tmp_path / "notes.txt", tmp_path / "other.md", tmp_path / "picture.png"
    notes.write_text("To be,\nor not.\n", "utf-8")
    other.write_text("```\ncode\n```", "utf-8")
    picture.write_bytes(b"\x89PNG\r\n\x00\xff")
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    chooser.value.set_files([notes, other])
    page.get_by_role("button", name="Remove other.md").wait_for()
    page.set_input_files("#attach-files", picture)
    page.wait_for_selector("#alert:not(:empty)")
    assert page.text_content("#alert") == "picture.png: this model reads text alone, and cannot see a picture"
    binary = tmp_path / "program.bin"
    binary.write_bytes(b"\x7fELF\xff")
    page.set_input_files("#attach-files", binary)
    until(page, "document.querySelector('#alert').textContent.startsWith('program.bin is not a text file')")
    large = tmp_path / "large.txt"
    large.write_text("x" * (600 << 10), "utf-8")
    page.set_input_files("#attach-files", large)
    until(page, "document.querySelector('#alert').textContent.includes('512 KiB')")
    page.get_by_role("button", name="Remove notes.txt").click()
    assert page.locator("#files button").all_text_contents() == ["other.md ×"]
    page.set_input_files("#attach-files", notes)
    page.get_by_role("button", name="Remove notes.txt").wait_for()
    ask(page, "What is it?")
    expected = "File other.md:\n````\n```\ncode\n```\n````\n\nFile notes.txt:\n```\nTo be,\nor not.\n```\n\nWhat is it?"
    assert sent[0]["messages"] == [user(expected)]
    assert page.locator("#files button").count() == 0
    assert page.locator(".attached summary").all_text_contents() == ["other.md", "notes.txt"]
    page.locator(".attached summary").last.click()
    assert page.get_by_role("region", name="Attached text").last.is_visible()
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["dropped"], "dropped.txt", { type: "text/plain" }));
          const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true });
          document.querySelector("#compose").dispatchEvent(drop);
          const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
          document.querySelector("#question").dispatchEvent(paste);
        }"""
    )
    until(page, "document.querySelectorAll('#files button').length === 2")
    page.press("#question", "Enter")  # files without text are a message
    page.wait_for_selector(".message.assistant:nth-child(4)[aria-busy=false]")
    assert sent[1]["messages"][2] == user("\n\n".join(["File dropped.txt:\n```\ndropped\n```"] * 2))


def test_conversations_are_kept_and_deleted(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    short(page)
    first = ask(page, "The first one")
    page.click("#new")
    assert page.locator(".message").count() == 0
    ask(page, "The second one")
    page.reload()
    page.wait_for_selector("#list li:nth-child(2)")
    assert page.locator("#list .open").all_text_contents() == ["The second one", "The first one"]
    assert page.locator("#list [aria-current=true]").text_content() == "The second one"
    assert page.locator(".message.user .text").text_content() == "The second one"
    page.get_by_role("button", name="The first one", exact=True).click()
    until(page, "document.querySelector('.message.user .text').textContent === 'The first one'")
    assert page.locator(".message.assistant .text").last.text_content() == first
    assert "24 tokens" in page.locator(".figures").text_content()
    decide = {"accept": False}
    page.on("dialog", lambda dialog: dialog.accept() if decide["accept"] else dialog.dismiss())
    page.get_by_role("button", name="Delete The first one").click()
    assert page.locator("#list li").count() == 2
    decide["accept"] = True
    page.get_by_role("button", name="Delete The first one").click()
    until(page, "document.querySelectorAll('#list li').length === 1")
    assert page.locator(".message").count() == 0
    page.click("#delete-all")
    until(page, "document.querySelectorAll('#list li').length === 0")
    page.reload()
    page.wait_for_selector("#delete-all[disabled]")
    assert page.locator("#list li").count() == 0


def test_a_conversation_is_exported_and_imported(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **WIDE)
    short(page)
    assert page.is_disabled("#export-json")
    text = ask(page, "Wer da? 누구?")
    with page.expect_download() as saved:
        page.click("#export-markdown")
    assert saved.value.suggested_filename == "Wer-da-누구.md"
    written = Path(saved.value.path()).read_text("utf-8")
    assert written.startswith("# Wer da? 누구?\n\n**You**\n\nWer da? 누구?\n\n**chatty** (24 tokens")
    assert written.split()[-3:] == text.split()[-3:]
    with page.expect_download() as saved:
        page.click("#export-json")
    kept = tmp_path / saved.value.suggested_filename
    saved.value.save_as(kept)
    found = json.loads(kept.read_text("utf-8"))
    assert (found["format"], found["version"]) == ("edgespec-conversation", 1)
    assert [one["role"] for one in found["messages"]] == ["user", "assistant"]
    assert found["messages"][1]["how"]["rounds"] == found["messages"][1]["figures"]["rounds"]
    other = visit(server, **WIDE)
    (tmp_path / "wrong.json").write_text('{"messages": []}', "utf-8")
    other.set_input_files("#import-file", tmp_path / "wrong.json")
    other.wait_for_selector("#alert:not(:empty)")
    assert "Not imported" in other.text_content("#alert")
    other.set_input_files("#import-file", kept)
    other.wait_for_selector(".message.assistant")
    assert other.locator(".message.assistant .text").last.text_content() == text
    assert other.locator("#list .open").all_text_contents() == ["Wer da? 누구?"]


def test_a_model_without_a_template_continues_a_text(visit: Visit, served: Served) -> None:
    page = visit(served, **WIDE)
    short(page)
    sent = bodies(page)
    assert page.get_by_label("Text to continue").is_visible()
    assert "continues your text" in page.text_content("#empty")
    assert not page.is_visible("#system")
    ask(page, "ROMEO:")
    ask(page, "\nJULIET:")
    assert sent[0]["prompt"] == "ROMEO:"
    assert sent[1]["prompt"].startswith("ROMEO:")
    assert sent[1]["prompt"].endswith("\nJULIET:")
    assert len(sent[1]["prompt"]) > len("ROMEO:\nJULIET:")
    page.fill("#max_tokens", "")
    ask(page, "")  # continue
    assert sent[2]["max_tokens"] == 256
    assert sent[2]["prompt"].startswith(sent[1]["prompt"])


def test_thoughts_are_apart(visit: Visit, tmp_path: Path) -> None:
    """Cut an answer inside the thought that a model always starts with; the next request omits the thought."""
    with serving(with_template(THINKS, tmp_path), "--name", "chatty") as running:
        page = visit(running, **WIDE)
        short(page)
        sent = bodies(page)
        ask(page, QUESTION)
        assert page.locator(".message.assistant > .text").text_content() == ""
        thoughts = page.locator(".thoughts .text")
        assert thoughts.is_visible()  # no answer has arrived yet
        page.check("#show-drafts")
        written = "".join(page.locator(".message .raw > span").all_text_contents())
        assert not thoughts.is_visible()  # they are among what was written
        page.uncheck("#show-drafts")
        assert thoughts.inner_text().split() == written.split() != []
        ask(page, "And?")
        assert sent[1]["messages"][1] == {"role": "assistant", "content": ""}


def test_what_goes_wrong_is_said(visit: Visit, page_bundle: Path) -> None:
    """The page reports a text that is too long, and a server that is gone; the conversation is kept."""
    with serving(page_bundle, "--name", "chatty") as running:
        page = visit(running, expected=("status of 400", "ERR_CONNECTION_REFUSED"), **WIDE)
        ask(page, "word " * 3000)
        assert "context" in page.locator(".problem").text_content()
        running.process.terminate()
        running.process.wait(60)
        page.fill("#question", "Still there?")
        page.press("#question", "Enter")
        until(page, "document.querySelectorAll('.message').length === 4")
        until(page, "[...document.querySelectorAll('.problem')].at(-1).textContent !== ''")
        assert page.locator(".problem").last.text_content() == "the server does not answer"
        assert page.text_content("#status") == "the server does not answer"


def test_a_model_is_picked(visit: Visit, page_bundle: Path, served_bundle: Path) -> None:
    """A model chosen by keyboard is announced to screen readers, saved, and used from then on."""
    from axe_playwright_python.sync_playwright import Axe

    with serving(page_bundle, str(served_bundle), "--name", "chatty", "--name", "plain") as running:
        page = visit(running, **WIDE)
        short(page, 8)
        sent = bodies(page)
        assert page.text_content("#model") == "chatty"
        picker = page.get_by_label("Model", exact=True)
        assert picker.locator("option").all_text_contents() == ["chatty", "plain"]
        assert page.text_content("#models-hint") == "It is loaded when it is asked first."
        ask(page, QUESTION)
        assert page.text_content("#models-hint") == ""
        picker.focus()
        page.keyboard.press("ArrowDown")
        until(page, "document.querySelector('#model').textContent === 'plain'")
        assert page.text_content("#status").startswith("plain answers from now on. It is loaded")
        assert page.locator("#question").get_attribute("placeholder") == "Begin a text"
        assert page.title() == "plain · edgespec"
        ask(page, "Speak!")
        assert [one["model"] for one in sent] == ["chatty", "plain"]
        assert "prompt" in sent[1]
        page.reload()
        until(page, "document.querySelector('#model').textContent === 'plain'")
        assert page.locator("#models").input_value() == "plain"
        page.select_option("#models", "chatty")
        until(page, "document.querySelector('#model').textContent === 'chatty'")
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_a_server_with_one_model_offers_no_picker(visit: Visit, server: Served) -> None:
    page = visit(server, **WIDE)
    page.wait_for_selector("#settings")
    assert not page.is_visible("#models")
