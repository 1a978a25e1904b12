"""The adapter of transformers, on an embedded model: judged like any other server."""

from __future__ import annotations

import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgespec.export.source.source import resolve
from edgespec.judge.client import Server
from edgespec.judge.judging import Options, judge
from edgespec.judge.launch import running

ADAPTERS = Path(__file__).resolve().parents[2] / "benchmarks" / "adapters.py"


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("torch") is None or find_spec("transformers") is None, reason="needs the extra train")
def test_transformers_with_prompt_lookup_writes_its_plain_text() -> None:
    command = f"{sys.executable} {ADAPTERS} transformers {resolve('builtin:shakespeare')} --threads 1 --port {{port}}"
    with running(command) as plain, running(f"{command} --lookup 3") as guessing:
        with closing(Server(plain)) as server:
            server.probe()
            assert (server.abilities.likeliest, server.abilities.choices) == (20, 16)
            one, other = server.ask("ROMEO:", 8, 1.0, 2)
            assert "".join(token.text for token in one.tokens) == one.text
            assert {one.written, other.written} == {16}
        found = judge(Server(guessing), Server(plain), ["ROMEO:", "the king the king the"],
                      Options(12, 2, 1, plan=None), lambda *_: None)  # fmt: skip
    assert found.verdict in ("identical", "near-ties"), found.line
    assert found.forced is not None
    assert found.forced.places > 0
