"""Conversations: what was computed stays, and the tokens are those of the template's text of all messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.slots.slot import Slot
from tests.support.chats import FOLDER
from tests.support.checkpoints import write_chain

END = "<|im_end|>"
QUESTIONS = ("How long?", "And then?")


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
            Exporter(ExportOptions(str(source), folder / "bundle", [], "fp32", threads=1)).run()
            made[chain, template] = folder / "bundle"
        return made[chain, template]

    return get


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tokens of every prefill, in whatever pieces they come."""
    seen: list[int] = []
    prefill = Slot.prefill

    def noted(self: Slot, tokens: Sequence[int]) -> None:
        seen.extend(int(token) for token in tokens)
        prefill(self, tokens)

    monkeypatch.setattr(Slot, "prefill", noted)
    return seen


def ready(engine: Engine, fed: list[int] | None) -> None:
    """Have what an engine tries out done, which is no prefill of a request."""
    engine.rows_exact()
    if fed is not None:
        fed.clear()


CHATML = (FOLDER / "qwen25.jinja").read_text("utf-8")
THE_ANSWER = ("\u010a", "x", "q", "z", END)


FairLock = tuple[list[list[int]], list[Result], list[dict[str, Any]]]


def two_turns(
    engine: Engine, fed: list[int] | None = None, **how: Any
) -> tuple[list[list[int]], list[Result], list[dict[str, Any]]]:
    """Prompts, results and messages of a conversation; ``fed`` has its prefills alone."""
    ready(engine, fed)
    conversation = engine.conversation(**how)
    prompts, results = [], []
    for question in QUESTIONS:
        results.append(conversation.ask(question, max_new_tokens=8))
        prompts.append(list(conversation._prompt))
    return prompts, results, conversation.messages


@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_nothing_is_computed_twice(make: Callable[..., Path], fed: list[int], method: str) -> None:
    """The second turn's prompt goes on where the first one's answer ended; its EOS, which waited, is fed now."""
    engine = load(make(THE_ANSWER, CHATML), threads=1)
    prompts, results, messages = two_turns(engine, fed, settings=Settings(method=method))
    end = engine.codec.token_id(END)
    assert [result.text for result in results] == ["xqz", "xqz"]
    assert [result.finish for result in results] == ["eos", "eos"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    held = [*prompts[0], *results[0].tokens[:-1]]
    assert results[0].tokens[-1] == end
    assert prompts[1][: len(held) + 1] == [*held, end]
    stats = results[1].stats
    assert (stats.prompt_tokens, stats.reused_tokens) == (len(prompts[1]), len(held))
    assert fed == [*prompts[0][:-1], *prompts[1][len(held) : -1]]


def test_the_tokens_are_those_of_the_whole_conversation(make: Callable[..., Path]) -> None:
    """As transformers tokenizes the three messages at once."""
    reference = json.loads((FOLDER / "reference.json").read_text("utf-8"))["templates"]["qwen25"]
    engine = load(make(THE_ANSWER, CHATML), threads=1)
    prompts, _, messages = two_turns(engine)
    assert prompts[1] == reference["two turns of a chain"]["ids"]
    assert prompts[1] == engine.codec.chat(messages[:3])
    fresh = load(make(THE_ANSWER, CHATML), threads=1)
    again = fresh.generate(prompts[1], max_new_tokens=8)
    assert again.stats.reused_tokens == 0
    assert again.tokens == engine.chat(messages[:3], max_new_tokens=8).tokens


def test_an_answer_that_was_cut_goes_on_the_same_way(make: Callable[..., Path], fed: list[int]) -> None:
    engine = load(make(THE_ANSWER, CHATML), threads=1)
    ready(engine, fed)
    conversation = engine.conversation()
    first = conversation.ask(QUESTIONS[0], max_new_tokens=2)
    prompt = list(conversation._prompt)
    assert (first.text, first.finish) == ("xq", "length")
    second = conversation.ask(QUESTIONS[1], max_new_tokens=2)
    assert second.stats.reused_tokens == len(prompt) + 1
    assert conversation._prompt[: len(prompt) + 2] == [*prompt, *first.tokens]
    assert fed == [*prompt[:-1], *conversation._prompt[len(prompt) + 1 : -1]]


def test_text_with_other_tokens_than_were_written(make: Callable[..., Path], fed: list[int]) -> None:
    """``the`` was written letter by letter; the template's text has it in one piece, and that counts."""
    engine = load(make(("\u010a", "t", "h", "e", END), CHATML), threads=1)
    prompts, results, messages = two_turns(engine, fed)
    assert results[0].text == "the"
    rewritten = engine.codec.encode("the", special=False)
    assert rewritten != results[0].tokens[:-1]
    assert prompts[1] == engine.codec.chat(messages[:3])
    assert prompts[1][len(prompts[0]) :][: len(rewritten)] == rewritten
    assert results[1].stats.reused_tokens == len(prompts[0])
    assert fed == [*prompts[0][:-1], *prompts[1][len(prompts[0]) : -1]]


FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('|')[-1] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_template_that_drops_thoughts(make: Callable[..., Path], fed: list[int]) -> None:
    """Of a rewritten answer what is in common is kept: all before it."""
    engine = load(make(("\u010a", "x", "|", "q", END), FORGETFUL), threads=1)
    prompts, results, messages = two_turns(engine, fed)
    assert messages[1]["content"] == results[0].text == "x|q"
    assert prompts[1] == engine.codec.chat(messages[:3])
    assert results[1].stats.reused_tokens == len(prompts[0])
    assert fed == [*prompts[0][:-1], *prompts[1][len(prompts[0]) : -1]]


SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_the_space_before_an_answer_is_not_written_twice(make: Callable[..., Path], fed: list[int]) -> None:
    engine = load(make((":", "\u0120", "x", "q", END), SPACED), threads=1)
    prompts, results, messages = two_turns(engine, fed)
    assert results[0].text == " xq"
    assert messages[1]["content"] == "xq"
    held = [*prompts[0], *results[0].tokens[:-1]]
    assert prompts[1][: len(held)] == held
    assert results[1].stats.reused_tokens == len(held)
    assert fed == [*prompts[0][:-1], *prompts[1][len(held) : -1]]


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


def test_chat_by_the_command_line(make: Callable[..., Path]) -> None:
    bundle = make(THE_ANSWER, CHATML)
    prompts, results, _ = two_turns(load(bundle, threads=1))
    asked = [item for question in QUESTIONS for item in ("--prompt", question)]
    made = run(bundle, "--chat", "--stats", "--max-new-tokens", 8, *asked)
    assert made.exit_code == 0
    assert made.stdout == "xqz\nxqz\n"
    held = len(prompts[0]) + len(results[0].tokens) - 1
    assert f"{len(prompts[0])} tokens, 0 of them still in the cache" in made.stderr
    assert f"{len(prompts[1])} tokens, {held} of them still in the cache" in made.stderr


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
