"""Chat templates: what they may use, what is refused, which one is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf

MESSAGES = [{"role": "user", "content": "how long?"}, {"role": "assistant", "content": "as long as it takes"}]


@pytest.fixture
def templated(tmp_path: Path) -> Callable[..., TextCodec]:
    def get(template: Any, **config: Any) -> TextCodec:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        hf.make_tokenizer(400, True).save(str(folder / "tokenizer.json"))
        described = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
        return TextCodec(folder)

    return get


def rendered(codec: TextCodec, messages: Any = MESSAGES, tools: Any = None) -> str:
    return codec.tokenizer.decode(codec.chat(messages, tools), skip_special_tokens=False)


def test_a_template_is_rendered(templated: Callable[..., TextCodec]) -> None:
    codec = templated(hf.CHAT_TEMPLATE)
    assert rendered(codec) == "user: how long?\nassistant: as long as it takes\nassistant:"
    special = templated("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}")
    assert special.chat(MESSAGES)[0] == special.token_id("<s>")
    assert special.chat(MESSAGES)[-1] == special.token_id("</s>")
    assert special.chat(MESSAGES).count(0) == 1  # not a second BOS by the tokenizer


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{%- for m in messages %}\n    {%- if loop.last %}{%- break %}{%- endif %}{{ m.role }}{%- endfor %}", "user"),
        ("{% if true %}\n  a\n{% endif %}b", "  a\nb"),
        ("{{ tools | tojson }}", '[{"name": "caf\u00e9"}]'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "name": "caf\u00e9"\n }\n]'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ add_generation_prompt }}", "True"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ missing is defined }}", "False"),
        ("{{ messages[0]['content'].split(' ') | last }}", "long?"),
    ],
)
def test_what_templates_may_use(templated: Callable[..., TextCodec], template: str, expected: str) -> None:
    assert rendered(templated(template), tools=[{"name": "caf\u00e9"}]) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ range(10 ** 9) | list }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ missing.attribute }}",
        "{{ messages[7].content.upper() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | tojson | int + [] }}",
        "{{ {}['x'] + 1 }}",
        "{{ 'x'.encode('nonsense') }}",
        "{{ 'abc'.index('z') }}",
        "{% for",
        "{{ unknown_function() }}",
        "{{ x | unknown_filter }}",
    ],
)
def test_a_template_that_misbehaves_is_refused(templated: Callable[..., TextCodec], template: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        templated(template).chat(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}", "{{ messages.__class__ }}",
     "{{ messages | attr('__class__') }}", "{{ self._TemplateReference__context }}"],
)  # fmt: skip
def test_what_the_sandbox_hides_is_not_there(templated: Callable[..., TextCodec], template: str) -> None:
    codec = templated(template)
    with suppress(InvalidRequest):
        assert rendered(codec) == ""


def test_the_words_of_the_template_reach_the_user(templated: Callable[..., TextCodec]) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        templated("{{ raise_exception('roles must alternate') }}").chat(MESSAGES)


def test_of_several_templates_the_default_is_used(templated: Callable[..., TextCodec]) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert rendered(templated(named)) == "default"
    with pytest.raises(InvalidRequest, match="no chat template"):
        templated(named[:1]).chat(MESSAGES)


def test_a_template_of_its_own_file_comes_first(templated: Callable[..., TextCodec], tmp_path: Path) -> None:
    templated("old")
    (tmp_path / "model" / "chat_template.jinja").write_text("caf\u00e9 {{ messages[0].role }}", "utf-8")
    assert rendered(TextCodec(tmp_path / "model")) == "caf\u00e9 user"


@pytest.mark.parametrize("template", [None, [], "", 3])
def test_no_template(templated: Callable[..., TextCodec], template: Any) -> None:
    codec = templated(template)
    assert codec.chat_template is None
    with pytest.raises(InvalidRequest, match=r"no chat template(.|\n)*plain prompts"):
        codec.chat(MESSAGES)
