"""Conversations: what was computed stays, and the tokens are those of the template's text of all messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from edgespec.cli.app import cli
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.slots.slot import Slot
from tests.support.chats import FOLDER, REFERENCE
from tests.support.checkpoints import write_chain

END = "<|im_end|>"
QUESTIONS = ("How long?", "And then?")
CHATML = (FOLDER / "qwen25.jinja").read_text("utf-8")
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('|')[-1] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
THE_ANSWER = ("\u010a", "x", "q", "z", END)


class Turns(NamedTuple):
    """A conversation of two turns, and the tokens that were read for it."""

    prompts: list[list[int]]
    results: list[Result]
    messages: list[dict[str, Any]]
    fed: list[int]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def make(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(chain of tokens, template) -> a bundle that answers every question with the chain after its first token."""
    made: dict[tuple[tuple[str, ...], str], Path] = {}

    def get(chain: tuple[str, ...], template: str) -> Path:
        if (chain, template) not in made:
            folder = tmp_path_factory.mktemp("chain")
            described = {"bos_token": "<s>", "eos_token": END, "chat_template": template}
            vocab = tokenizer.get_vocab_size()
            source = write_chain(folder / "model", tokenizer, vocab, chain, described, tokenizer.token_to_id(END))
            export_model(ExportOptions(str(source), folder / "bundle", [], "fp32", threads=1), golden=False)
            made[chain, template] = folder / "bundle"
        return made[chain, template]

    return get


@pytest.fixture
def two_turns(prefills: list[tuple[Slot, list[int]]]) -> Callable[..., Turns]:
    """Ask ``QUESTIONS``; ``prefills`` then has only those of the conversation."""

    def ask(engine: Engine, **how: Any) -> Turns:
        engine.rows_exact()  # this check runs its own prefill
        prefills.clear()
        conversation, prompts, results = engine.conversation(**how), list[list[int]](), list[Result]()
        for question in QUESTIONS:
            results.append(conversation.ask(question, max_new_tokens=8))
            prompts.append(list(conversation._prompt))
        return Turns(prompts, results, conversation.messages, [token for _, tokens in prefills for token in tokens])

    return ask


@pytest.mark.parametrize(
    "chain, template, text, kept",
    [
        (THE_ANSWER, CHATML, "xqz", True),  # its EOS, which waited, is fed now
        # written letter by letter; the template's text has it in one piece, and that counts
        (("\u010a", "t", "h", "e", END), CHATML, "the", False),
        (("\u010a", "x", "|", "q", END), FORGETFUL, "x|q", False),  # thoughts are dropped
        ((":", "\u0120", "x", "q", END), SPACED, " xq", True),  # the space before an answer is not written twice
    ],
)
@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_nothing_is_computed_twice(
    make: Callable[..., Path],
    two_turns: Callable[..., Turns],
    method: str,
    chain: tuple[str, ...],
    template: str,
    text: str,
    kept: bool,
) -> None:
    """``kept``: the second prompt continues where the first answer ended; else only the part before it is common."""
    engine = load(make(chain, template), threads=1)
    prompts, results, messages, fed = two_turns(engine, settings=Settings(method=method))
    end = engine.codec.token_id(END)
    assert [(result.text, result.finish, result.tokens[-1]) for result in results] == [(text, "eos", end)] * 2
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"] == text.strip()
    if kept:
        held = [*prompts[0], *results[0].tokens[:-1]]
        assert prompts[1][: len(held)] == held
    else:
        held = prompts[0]
        assert prompts[1] == engine.codec.chat(messages[:3])
        assert prompts[1][len(held) :][: len(results[0].tokens) - 1] != results[0].tokens[:-1]
    stats = results[1].stats
    assert (stats.prompt_tokens, stats.reused_tokens) == (len(prompts[1]), len(held))
    assert fed == [*prompts[0][:-1], *prompts[1][len(held) : -1]]


def test_the_tokens_are_those_of_the_whole_conversation(
    make: Callable[..., Path], two_turns: Callable[..., Turns]
) -> None:
    """As transformers tokenizes the three messages at once."""
    reference = REFERENCE["qwen25"]
    engine = load(make(THE_ANSWER, CHATML), threads=1)
    prompts, _, messages, _ = two_turns(engine)
    assert prompts[1] == reference["two turns of a chain"]["ids"]
    assert prompts[1] == engine.codec.chat(messages[:3])
    fresh = load(make(THE_ANSWER, CHATML), threads=1)
    again = fresh.generate(prompts[1], max_new_tokens=8)
    assert again.stats.reused_tokens == 0
    assert again.tokens == engine.chat(messages[:3], max_new_tokens=8).tokens


def test_an_answer_that_was_cut_goes_on_the_same_way(
    make: Callable[..., Path], prefills: list[tuple[Slot, list[int]]]
) -> None:
    engine = load(make(THE_ANSWER, CHATML), threads=1)
    engine.rows_exact()
    prefills.clear()
    conversation = engine.conversation()
    first = conversation.ask(QUESTIONS[0], max_new_tokens=2)
    prompt = list(conversation._prompt)
    assert (first.text, first.finish) == ("xq", "length")
    second = conversation.ask(QUESTIONS[1], max_new_tokens=2)
    assert second.stats.reused_tokens == len(prompt) + 1
    assert conversation._prompt[: len(prompt) + 2] == [*prompt, *first.tokens]
    fed = [token for _, tokens in prefills for token in tokens]
    assert fed == [*prompt[:-1], *conversation._prompt[len(prompt) + 1 : -1]]


def test_a_question_that_is_refused_is_not_kept(make: Callable[..., Path]) -> None:
    strict = (
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content + '\\n' }}"
    )
    conversation = load(make(THE_ANSWER, strict), threads=1).conversation()
    conversation.ask("a", max_new_tokens=3)
    assert len(conversation.messages) == 2  # whose text the template would not write
    with pytest.raises(InvalidRequest, match="one only"):
        conversation.ask("b")
    assert len(conversation.messages) == 2


def test_tools_and_options_reach_the_template(make: Callable[..., Path]) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    template = "{{ tools | tojson }} {{ mood }} {{ messages | length }}{{ '\\n' }}"
    engine = load(make(THE_ANSWER, template), threads=1)
    conversation = engine.conversation([{"role": "system", "content": "s"}], tools=[tool], template_options={"mood": 1})
    conversation.ask("a", max_new_tokens=1)
    text = engine.codec.decode(conversation._prompt)
    assert text == f"{json.dumps([tool])} 1 2\n"
    conversation.messages.append({"role": "tool", "content": "noon"})
    conversation.ask(max_new_tokens=1)
    assert engine.codec.decode(conversation._prompt).endswith(" 1 4\n")
    made = engine.chat([{"role": "user", "content": "a"}], tools=[tool], template_options={"mood": 2}, max_new_tokens=1)
    assert made.stats.prompt_tokens == len(engine.codec.encode(f"{json.dumps([tool])} 2 1\n", special=False))


# -- the command line --------------------------------------------------------------------------------------------------


def run(bundle: Path, *arguments: object, stdin: str = "") -> Any:
    return CliRunner().invoke(cli, ["run", str(bundle), "--threads", "1", *map(str, arguments)], input=stdin)


def test_template_options_by_the_command_line(make: Callable[..., Path], tmp_path: Path) -> None:
    template = (
        "{% if mood is not false or size != 3 or name != 'a=b' or not tools %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[-1].content + '\\n' }}"
    )
    bundle, tools = make(THE_ANSWER, template), tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "clock"}}]', "utf-8")
    options = [f"--template-option={item}" for item in ("mood=false", "size=3", "name=a=b")]
    made = run(bundle, "--chat", *options, "--tools", tools, "--max-new-tokens", 8, stdin="hi\n")
    assert (made.exit_code, made.stdout) == (0, "xqz\n")
    assert run(bundle, "--chat", *options[:2], "--tools", tools, stdin="hi\n").exit_code == 1


@pytest.mark.parametrize(
    "arguments, tools, message",
    [
        (("--template-option", "x"), None, "expected KEY=VALUE"),
        (("--template-option", "a b=1"), None, "expected KEY=VALUE"),
        (("--template-option", "messages=1"), None, "is no option of a template"),
        ((), "{", "not readable as JSON"),
        ((), "{}", "expected a list of JSON schemas"),
        ((), "[1]", "expected a list of JSON schemas"),
        ((), "", "not readable as JSON"),
        (("--tools", "/no/such/file"), None, "cannot be read"),
    ],
)
def test_wrong_options(
    make: Callable[..., Path], tmp_path: Path, arguments: tuple[str, ...], tools: str | None, message: str
) -> None:
    if tools is not None:
        (tmp_path / "tools.json").write_text(tools, "utf-8")
        arguments = (*arguments, "--tools", str(tmp_path / "tools.json"))
    made = run(make(THE_ANSWER, CHATML), "--chat", *arguments, stdin="hi\n")
    assert made.exit_code == 1
    assert isinstance(made.exception, InvalidRequest) or message in made.stderr
    assert message in f"{made.exception} {made.stderr}"


@pytest.mark.parametrize("option", [("--tools", "x.json"), ("--template-option", "a=1")])
def test_options_of_a_chat_alone(make: Callable[..., Path], option: tuple[str, str]) -> None:
    made = run(make(THE_ANSWER, CHATML), "--prompt", "x", *option)
    assert made.exit_code == 2
    assert f"{option[0]} belongs to --chat" in made.stderr
