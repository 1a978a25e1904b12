"""A conversation that outgrows the context continues: the model no longer sees the oldest turns; nothing is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import ContextFull
from tests.cli.conftest import export
from tests.conftest import DRAFT
from tests.support.requests import ask

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CONTEXT, SYSTEM = 200, {"role": "system", "content": "Speak."}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small model with a chat template."""
    made = export(tmp_path_factory.mktemp("chatty") / "bundle", DRAFT, "--quantizer", "rtn")
    (made / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return made


@pytest.fixture
def chatty(bundle: Path) -> Engine:
    """Load ``bundle`` with a small context."""
    return load(bundle, threads=1, context=CONTEXT, budget="off")


def test_the_oldest_turns_leave_and_later_ones_are_reused(chatty: Engine) -> None:
    conversation = chatty.conversation([SYSTEM])
    lengths, reused, left = [], [], []
    for number in range(12):
        result = conversation.ask(f"What says the king, number {number}?", max_new_tokens=24, ignore_eos=True)
        assert result.finish == "length"
        lengths.append(result.stats.prompt_tokens)
        reused.append(result.stats.reused_tokens)
        left.append(conversation.left_out)
    assert len(conversation.messages) == 1 + 2 * 12
    assert max(lengths) + 24 <= CONTEXT
    assert left == sorted(left)
    assert len(set(left)) > 2
    assert all(number % 2 == 0 for number in left)  # whole turns
    slid = [left[at] > left[at - 1] for at in range(1, 12)]
    assert not any(map(all, pairwise(slid)))  # room for several turns is made at once
    assert all(was >= lengths[at] for at, (was, moved) in enumerate(zip(reused[1:], slid, strict=True)) if not moved)
    seen = chatty.codec.chat([SYSTEM, *conversation.messages[1 + left[-1] : -1]])
    assert conversation._prompt == seen
    assert result.tokens == ask(chatty, seen, max_new_tokens=24).tokens


def test_a_question_without_room_is_refused_and_the_conversation_goes_on(chatty: Engine) -> None:
    conversation = chatty.conversation([SYSTEM])
    conversation.ask("How long?", max_new_tokens=4)
    before = [dict(message) for message in conversation.messages]
    with pytest.raises(ContextFull, match="no room for a new one"):
        conversation.ask("why " * 300, max_new_tokens=4)
    assert (conversation.messages, conversation.left_out) == (before, 0)
    assert conversation.ask("And then?", max_new_tokens=4, ignore_eos=True).finish == "length"
    assert conversation.left_out == 0


def test_messages_that_are_taken_away_are_no_longer_counted(chatty: Engine) -> None:
    conversation = chatty.conversation([SYSTEM])
    while not conversation.left_out:
        conversation.ask("What says the king?", max_new_tokens=24, ignore_eos=True)
    conversation.messages = [SYSTEM]
    conversation.ask("How long?", max_new_tokens=4)
    assert conversation.left_out == 0
    assert conversation._prompt == chatty.codec.chat([SYSTEM, {"role": "user", "content": "How long?"}])


def test_a_chat_on_the_command_line_goes_on(bundle: Path) -> None:
    questions = ["What says the king?"] * 8 + ["And then?"]
    wanted = ["run", str(bundle), "--chat", "--context", str(CONTEXT), "--max-new-tokens", "24", "--threads", "1"]
    made = CliRunner().invoke(cli, [*wanted, *(item for text in questions for item in ("--prompt", text))])
    assert made.exit_code == 0, made.output
    assert "the context is full: the oldest " in made.stderr
    assert made.stderr.count(" tokens at ") == 9
    lost = CliRunner().invoke(cli, [*wanted, "--prompt", "How long?", "--prompt", "why " * 300])
    assert isinstance(lost.exception, ContextFull)
    assert lost.stderr.count(" tokens at ") == 1
