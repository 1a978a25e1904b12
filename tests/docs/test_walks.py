"""The walks of CONTRIBUTING.md: every file and function that they name exists."""

from __future__ import annotations

import pytest

from tests.docs.conftest import text_of
from tools import walk

PAGE = text_of("CONTRIBUTING.md")
STEPS = walk.steps(PAGE)


def test_every_step_exists() -> None:
    for path, name in STEPS:
        assert walk.line_of(path, name) > 0
    found = {name for path, _ in STEPS for name in walk.defined(path)}
    assert walk.methods(PAGE) <= found


def test_the_walks_begin_and_end_where_they_say() -> None:
    named = [name for _, name in STEPS]
    assert named[0] == "Engine.generate"
    assert named.index("Engine.generate") < named.index("decode") < named.index("Request.end")
    assert named.index("_Routes._answer") < named.index("Reader.read") < named.index("RunningBatch.begin")


@pytest.mark.parametrize("path, name", [("edgespec/engine/engine.py", "Engine.generated"), ("edgespec/none.py", "f")])
def test_a_wrong_step_would_be_seen(path: str, name: str) -> None:
    with pytest.raises(LookupError):
        walk.line_of(path, name)
