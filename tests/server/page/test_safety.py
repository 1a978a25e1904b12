"""The page keeps the key to itself, renders generated text without its markup, and obeys its security policy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.page.conftest import Visit, ask, serving, short, until
from tests.server.page.test_reach import carry

pytestmark = pytest.mark.nightly

WIDE = {"viewport": {"width": 1280, "height": 800}}
KEY = "열쇠 sésame"
EVERYTHING_KEPT = """async () => {
  const open = (request) => new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
  const database = await open(indexedDB.open("edgespec"));
  const kept = await open(database.transaction("conversations").objectStore("conversations").getAll());
  database.close();
  return JSON.stringify([kept, { ...localStorage }, document.cookie, location.href]);
}"""


def test_a_key_is_asked_for_and_kept_in_its_tab(visit: Visit, page_bundle: Path) -> None:
    with serving(page_bundle, "--name", "chatty", "--api-key", KEY) as running:
        page = visit(running, expected=("status of 401",), **WIDE)
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#key-wrong').textContent !== ''")
        assert "API key" in page.text_content("#key-wrong")
        page.fill("#key", KEY)
        page.get_by_role("button", name="Use this key").click()
        dialog.wait_for(state="hidden")
        assert page.text_content("#model") == "chatty"
        short(page, 8)
        assert ask(page, "Speak")
        assert page.evaluate("sessionStorage.getItem('edgespec.key')") == KEY
        kept = page.evaluate(EVERYTHING_KEPT)
        assert "Speak" in kept
        assert KEY not in kept
        page.reload()
        until(page, "document.querySelector('#model').textContent !== ''")
        assert not dialog.is_visible()
        page.evaluate("sessionStorage.setItem('edgespec.key', 'no longer')")
        page.fill("#question", "Again")
        page.press("#question", "Enter")
        dialog.wait_for()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        dialog.wait_for(state="hidden")
        assert "API key" in page.locator(".problem").last.text_content()
        page.get_by_role("button", name="Regenerate").last.click()
        page.locator(".message.assistant[aria-busy=false]").nth(1).wait_for()
        assert page.locator(".problem:not(:empty)").count() == 0
        page.click("#forget-key")
        dialog.wait_for()
        assert page.evaluate("sessionStorage.length") == 0
        assert not [one for one in page.asked if "key=" in one.url]


def rendered(page: Any, text: str) -> str:
    """Make elements of Markdown, as the page does, and write them down."""
    return str(
        page.evaluate(
            """async (text) => {
              const { show } = await import("/page/markdown.js");
              const place = document.createElement("div");
              show(place, text);
              const shown = (one) => ["href", "start"].includes(one.name) ? ` ${one.name}=${one.value}` : "";
              const write = (node) => node.nodeType === 3 ? node.data :
                `<${node.localName}${[...node.attributes].map(shown).join("")}>` +
                [...node.childNodes].map(write).join("") + `</${node.localName}>`;
              return [...place.childNodes].map(write).join("");
            }""",
            text,
        )
    )


COPY = "<button>Copy</button></div>"
MARKDOWN = [
    ("plain\ntext\n\nnext", "<p>plain\ntext</p><p>next</p>"),
    ("# One\n###### Six #\n#no", "<h3>One</h3><h6>Six</h6><p>#no</p>"),
    ("**a** __b__ *c* _d_ ~~e~~", "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> <s>e</s></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("snake_case_name 2 * 3 * 4 ** **", "<p>snake_case_name 2 * 3 * 4 ** **</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    (r"\*no\* \a", r"<p>*no* \a</p>"),
    ("- a\n- b\n  - c\n\n    d\n- e", "<ul><li>a</li><li>b<ul><li><p>c</p><p>d</p></li></ul></li><li>e</li></ul>"),
    ("3. a\n4. b", "<ol start=3><li>a</li><li>b</li></ol>"),
    ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    ("```x\na < b\n\n# no\n```\nafter",
     f"<div><div><span>x</span>{COPY}<pre><code>a < b\n\n# no</code></pre></div><p>after</p>"),
    ("~~~\n```\n~~~", f"<div><div><span></span>{COPY}<pre><code>```</code></pre></div>"),
    ("```\nstill coming", f"<div><div><span></span>{COPY}<pre><code>still coming</code></pre></div>"),
    ("    indented", f"<div><div><span></span>{COPY}<pre><code>indented</code></pre></div>"),
    ("a\n\n---\n\nb", "<p>a</p><hr></hr><p>b</p>"),
    ("| a | b |\n|--|:-:|\n| *1* | 2 |", "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
     "<tbody><tr><td><em>1</em></td><td>2</td></tr></tbody></table></div>"),
    ("see https://a.b/c?d=e. [x](https://a.b/c)",
     "<p>see <span><a href=https://a.b/c?d=e>https://a.b/c?d=e</a></span>. "
     "<span><a href=https://a.b/c>x</a> (a.b)</span></p>"),
    ("[m](mailto:a@b.c) [x](javascript:alert) [y](data:text/html,z) [z](/page)",
     "<p><span><a href=mailto:a@b.c>m</a> (a@b.c)</span> [x](javascript:alert) [y](data:text/html,z) [z](/page)</p>"),
    ("![pic](https://a.b/c.png)", "<p>!<span><a href=https://a.b/c.png>pic</a> (a.b)</span></p>"),
    ("<b>x</b> &amp; <script>alert(1)</script>", "<p><b>x</b> & <script>alert(1)</script></p>"),
    ("> " * 60 + "deep", "<blockquote>" * 40 + f"<p>{'> ' * 20}deep</p>" + "</blockquote>" * 40),
]  # fmt: skip


def test_markdown_is_rendered_lightly(visit: Visit, server: Served) -> None:
    page = visit(server)
    assert [(source, rendered(page, source)) for source, _ in MARKDOWN] == MARKDOWN


HOSTILE = (
    '<script>document.title = "taken"</script>\n\n<img src="https://evil.example/x.png" onerror="document.title=1">\n\n'
    "![x](https://evil.example/y.png)\n\n[a](javascript:document.title=2)\n\n<style>body{display:none}</style>\n\n"
    '<a href="//evil.example">b</a>\n\n<iframe src="https://evil.example"></iframe>\n\n[c]( java\tscript:alert(1))'
)


def test_what_a_model_writes_is_no_markup(visit: Visit, server: Served, tmp_path: Path) -> None:
    page = visit(server, **WIDE)
    carry(page, tmp_path, HOSTILE)
    inside = page.locator(".message.assistant > .text")
    names = inside.locator("*").evaluate_all("all => [...new Set(all.map((one) => one.localName))]")
    assert set(names) <= {"p", "a", "span"}
    assert "<script>" in inside.text_content()
    links = inside.locator("a").evaluate_all("all => all.map((one) => [one.href, one.rel, one.target])")
    followed = [
        "https://evil.example/x.png",
        "https://evil.example/y.png",
        "https://evil.example/",
    ]  # on a click, and seen
    assert links == [[target, "noopener noreferrer", "_blank"] for target in followed]
    assert page.title() == "chatty · edgespec"


def test_whatever_is_rendered_keeps_its_words(visit: Visit, server: Served) -> None:
    """Random Markdown renders to known elements only and loses no letters, at every stage of streaming."""
    page = visit(server)
    marks = ["*", "**", "_", "`", "```\n", "~~", "[", "](", ")", "> ", "- ", "1. ", "# ", "|", "|-|\n", "\n", "\n\n",
             "  ", "\\", "<b>", "https://a.b/", "javascript:", "x", "yz", "한", "ש"]  # fmt: skip
    chance = random.Random(11)
    texts = ["".join(chance.choices(marks, k=chance.randrange(60))) for _ in range(400)]
    wrong = page.evaluate(
        r"""async (texts) => {
          const { show } = await import("/page/markdown.js");
          const known = new Set(("p h3 h4 h5 h6 hr pre code blockquote ul ol li div table thead tbody tr th td " +
            "strong em s a span button").split(" "));
          const told = (place) => {
            for (const one of place.querySelectorAll("button")) one.remove();
            return place.textContent;
          };
          const letters = (text) => [...text].filter((one) => /[x-z한ש]/.test(one)).sort().join("");
          return texts.filter((text) => {
            const [whole, grown] = [document.createElement("div"), document.createElement("div")];
            show(whole, text);
            for (let end = 0; end <= text.length; end += 3) show(grown, text.slice(0, end));
            show(grown, text);
            const elements = [...whole.querySelectorAll("*")];
            return !(elements.every((one) => known.has(one.localName))
              && elements.every((one) => [...one.attributes].every((each) => !each.name.startsWith("on")))
              && elements.every((one) => one.localName !== "a" || /^(https?|mailto):/.test(one.href))
              && whole.isEqualNode(grown)
              && (/]\(|```|~~~|\|-/.test(text) || letters(told(whole)) === letters(text)));
          });
        }""",
        texts,
    )
    assert wrong == []


LINKS = {
    "[https://bank.example/login](https://evil.example)": "https://bank.example/login (<https://evil.example/>)",
    "[https://microsoft.com/login](https://t.co/x)": "https://microsoft.com/login (<https://t.co/x>)",
    "[bank.example](mailto:attacker@evil.example?body=secret)": "bank.example (<attacker@evil.example>)",
    "[gnp.com\u202eelpmaxe.live](https://evil.example)": "gnp.comelpmaxe.live (<https://evil.example/>)",
    "[ban\u200dk.example](https://evil.example)": "ban\u200dk.example (<https://evil.example/>)",
    "[**bank**.`example`](https://evil.example)": "bank.example (<https://evil.example/>)",
    "[bank．example](https://evil.example)": "bank．example (<https://evil.example/>)",
    "[//bank](https://evil.example)": "//bank (<https://evil.example/>)",
    "[192.168.1.1](https://evil.example)": "192.168.1.1 (<https://evil.example/>)",
    "[bank.example](https://evil.example/bank.example)": "bank.example (<https://evil.example/bank.example>)",
    "https://b\u0430nk.example/": "https://b\u0430nk.example/ (<https://xn--bnk-6cd.example/>)",
    "<https://bank.example@evil.example/>": "<<https://bank.example>@evil.example/>",  # the link leads there
    "https://bank.example@evil.example/": "<https://bank.example>@evil.example/",
    "[x](https://bank.example@evil.example/)": "[x](<https://bank.example>@evil.example/)",
    "[the docs, 1.2](https://docs.example/a)": "<the docs, 1.2> (docs.example)",
    "[www.docs.example](https://docs.example/)": "<www.docs.example>",
    "[docs.example/a](https://docs.example/a)": "<docs.example/a>",
    "https://docs.example/a?b=bank.example": "<https://docs.example/a?b=bank.example>",
    "<https://docs.example>": "<https://docs.example>",
}


def test_a_label_names_no_other_host(visit: Visit, server: Served) -> None:
    page = visit(server)
    shown = {
        text: page.evaluate(
            """async (text) => {
              const { show } = await import("/page/markdown.js");
              const place = document.createElement("div");
              show(place, text);
              for (const one of place.querySelectorAll("a")) one.replaceWith(`<${one.textContent}>`);
              return place.textContent;
            }""",
            text,
        )
        for text in LINKS
    }
    assert shown == LINKS


WORK = """async ([texts, step]) => {
  const { show } = await import("/page/markdown.js");
  return texts.map((text) => {
    const made = document.createElement;
    let count = 0;
    document.createElement = function (name) { count += 1; return made.call(document, name); };
    const place = made.call(document, "div");
    for (let end = step; end < text.length; end += step) show(place, text.slice(0, end), true);
    show(place, text);
    document.createElement = made;
    return count;
  });
}"""


def test_a_text_that_grows_is_not_made_again(visit: Visit, server: Served) -> None:
    """Elements that are made for a text of many blocks, piece by piece, grow with it, and not with its square."""
    page = visit(server)
    block = "A *paragraph*.\n\n- one\n- two\n\n```x\ncode\n```\n\n> a quote\n\n| a |\n|---|\n| b |\n\n"
    short, long = page.evaluate(WORK, [[block * 20, block * 80], 40])
    assert long < 5 * short


def test_no_text_takes_long(visit: Visit, server: Served) -> None:
    """Text that a model repeats is rendered in linear time, not in quadratic time."""
    page = visit(server)
    pieces = ["*", "_a", "`", "[", "[a](", "> ", "- ", "|-", "**a", "https://", "# ", "a\n\n", "```\n", "~~x~~ ",
              "[a](https://b.c) ", "[a](b \"", "![", "<a ", "&#x", "https://a,,,,", " ", "\t", "a:"]  # fmt: skip
    for piece in pieces:
        rendered(page, piece * (60_000 // len(piece)))
    rendered(page, "a|b\n" + " " * 60_000 + "x-")
    rendered(page, "https://a" + "," * 60_000 + "x")
    rendered(page, "[" + "a" * 60_000 + "](https://b.c)")


def test_the_browser_holds_the_page_to_its_policy(visit: Visit, server: Served) -> None:
    """Even if a script ran: no other origin, no markup made of text, no script in the page, no frame around it."""
    page = visit(server, expected=("Content Security Policy", "TrustedHTML", "TrustedScript", "TrustedTypePolicy"))
    tried = page.evaluate(
        """async () => {
          const failed = async (action) => { try { await action(); return false; } catch { return true; } };
          const script = document.createElement("script");
          return {
            fetch: await failed(() => fetch("https://evil.example/")),
            markup: await failed(() => { document.body.innerHTML = "<p>x"; }),
            code: await failed(() => { script.text = "window.ran = true"; document.body.append(script); }),
            policy: await failed(() => trustedTypes.createPolicy("own", { createHTML: (text) => text })),
            image: await new Promise((done) => {
              const image = new Image();
              image.onerror = () => done(true);
              image.onload = () => done(false);
              image.src = "https://evil.example/x.png";
            }),
            ran: window.ran ?? false,
          };
        }"""
    )
    assert tried == {"fetch": True, "markup": True, "code": True, "policy": True, "image": True, "ran": False}
    frame = page.evaluate(
        """() => new Promise((done) => {
          const frame = document.createElement("iframe");
          frame.onload = () => { try { done(frame.contentDocument?.title ?? "") } catch { done("") } };
          frame.src = "/";
          document.body.append(frame);
        })"""
    )
    assert frame == ""
