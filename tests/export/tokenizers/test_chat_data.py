"""Chat templates as data: equal to the template, or refused with a reason."""

from __future__ import annotations

import pytest

from edgespec.export.tokenizers.chat_data import chat_data
from edgespec.runtimes.text.codec import TextCodec
from tests.support.chats import FOLDER

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def data_of(monkeypatch: pytest.MonkeyPatch, template: str) -> dict[str, object]:
    codec = TextCodec(FOLDER)
    monkeypatch.setattr(codec, "special", NAMES.get)
    codec.templates = {"default": template}
    return chat_data(codec)


@pytest.mark.parametrize("name", ["gemma", "phi3", "qwen25", "qwen3", "smollm"])
def test_templates_that_join_messages_are_data(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = data_of(monkeypatch, (FOLDER / f"{name}.jinja").read_text("utf-8"))
    assert "refused" not in data
    assert data["thoughts"] is (name == "qwen3")
    assert data["trimmed"] == (["user", "assistant"] if name == "gemma" else [])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "writes the date"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "depends on more than that"),
        ("{{ messages[-1].content }}", "leaves out a message"),
        ("{% for m in messages %}[{{ m.content | upper }}]{% endfor %}", "more than contents"),
        ("{% for m in messages %}{{ m.content | replace('two', '2') }}{% endfor %}", "more than contents"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_templates_that_do_more_are_refused(monkeypatch: pytest.MonkeyPatch, template: str, why: str) -> None:
    assert why in str(data_of(monkeypatch, template)["refused"])
