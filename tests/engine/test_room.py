"""Texts without a length: answers go to their end, or as far as the context and the memory reach."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.settings import MAX_NEW_TOKENS, Grammar
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.runtimes.files.manifest import Operators
from tests.cli.conftest import export
from tests.conftest import DRAFT

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
CONTEXT = 512
ASKED = [{"role": "user", "content": "What says the king?"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small model without a chat template."""
    return export(tmp_path_factory.mktemp("plain") / "bundle", DRAFT, "--quantizer", "rtn")


@pytest.fixture(scope="module")
def chatty(plain: Path) -> Path:
    """Copy ``plain`` and give it a chat template; the model never writes its EOS."""
    folder = shutil.copytree(plain, plain.parent / "chatty")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return folder


def opened(bundle: Path, operators: Operators, budget: str | int = "off") -> Engine:
    return load(bundle, operators=operators, threads=1, context=CONTEXT, budget=budget)


def test_an_answer_goes_to_the_end_of_the_context(chatty: Path, operators: Operators) -> None:
    with opened(chatty, operators) as engine:
        result = engine.chat(ASKED)
        assert result.finish == "context"
        assert result.stats.prompt_tokens + len(result.tokens) == CONTEXT
        assert result.tokens == engine.chat(ASKED, method="ar", max_new_tokens=CONTEXT, ignore_eos=True).tokens
        assert engine.conversation().ask("What says the king?").tokens == result.tokens
        assert engine.generate_batch(["The king"] * 2)[1].finish == "context"


def test_an_answer_goes_to_its_eos(chatty: Path, operators: Operators) -> None:
    with opened(chatty, operators) as engine:
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "acceptance": "coupled"}
        whole = engine.chat(ASKED, method="ar", **drawn).tokens
        token = next(token for token in whole[MAX_NEW_TOKENS + 20 :] if token not in whole[: MAX_NEW_TOKENS + 20])
        engine.eos = frozenset({token})
        result = engine.chat(ASKED, **drawn)
        assert (result.finish, result.tokens) == ("eos", whole[: whole.index(token) + 1])


def test_a_text_that_nothing_ends_has_a_length(plain: Path, chatty: Path, operators: Operators) -> None:
    with opened(plain, operators) as engine:
        result = engine.generate("The king")
        assert (result.finish, len(result.tokens)) == ("length", MAX_NEW_TOKENS)
        (together,) = engine.generate_batch(["The king"])
        assert together.tokens == result.tokens
        bound = engine.generate("The king", grammar=Grammar.regex("(a, ){200}"))
        assert (bound.finish, bound.text) == ("eos", "a, " * 200)
        assert len(bound.tokens) > MAX_NEW_TOKENS
    with opened(chatty, operators) as engine:
        endless = engine.generate("The king", ignore_eos=True)
        assert (endless.finish, len(endless.tokens)) == ("length", MAX_NEW_TOKENS)


def test_memory_is_taken_as_a_text_grows(chatty: Path, operators: Operators) -> None:
    with opened(chatty, operators) as engine, engine.stream(engine.codec.chat(ASKED)) as stream:
        next(stream)
        first = engine.kv_bytes()
        for _ in stream:
            pass
        assert first < engine.kv_bytes() * 2 // 3


@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_a_budget_ends_a_text_that_would_pass_it(chatty: Path, operators: Operators, method: str) -> None:
    with opened(chatty, operators, "2GiB") as engine:
        prompt = engine.codec.chat(ASKED)
        half = engine.generate(prompt, method=method, max_new_tokens=250 - len(prompt)).predicted_bytes
        whole = engine.chat(ASKED, method=method)
        assert whole.finish == "context"
        assert half < whole.predicted_bytes
    with opened(chatty, operators, "2GiB") as engine:
        engine.memory_budget.limit = half
        cut = engine.chat(ASKED, method=method)
        assert cut.finish == "length"
        assert cut.predicted_bytes <= half
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        assert 256 - 10 <= len(prompt) + len(cut.tokens) <= 256  # memory is counted by blocks of 64 tokens


def test_conversations_that_are_idle_make_room(chatty: Path, operators: Operators) -> None:
    with opened(chatty, operators, "2GiB") as engine:
        for question in ("How long?", "And then?"):
            engine.generate(f"user: {question}\n", max_new_tokens=200)
        whole = engine.chat(ASKED)
        engine.sessions.clear()
        with engine.stream("user: How long?\n", max_new_tokens=200) as one:
            next(one)
            for _ in engine.stream("user: And then?\n", max_new_tokens=200):
                pass
        engine.memory_budget.limit = whole.predicted_bytes
        assert engine.chat(ASKED).finish == "context"
        assert len(engine.sessions._idle) == 1
