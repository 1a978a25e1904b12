"""The Kotlin runtime on a JVM with real ONNX Runtime: its own tests, and token for token what Python writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.runtimes.files.manifest import FORMATS
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import OPERATORS, PROMPTS
from tests.support import golden
from tests.support.agreement import serve, ways
from tests.support.jvm import need_maven, run_tests, same_onnxruntime

LENGTH = 24
CHOSEN = (0, 4, 10, 13)  # prompts
SPREAD = (
    4  # formats between which the ways are shared out; native int4 has all of them (all: tests/support/agreement.py)
)


def write_golden(bundles: Callable[..., Path], path: Path) -> int:
    """What Python writes on fresh exports, for the Kotlin test; returns the number of requests."""
    requests = [(settings, PROMPTS[CHOSEN[number % len(CHOSEN)]]) for number, settings in enumerate(ways())]
    made = []
    for operators in OPERATORS:
        for number, form in enumerate(FORMATS):
            whole = operators == "native" and form == "int4"
            mine = requests if whole else requests[number % SPREAD :: SPREAD]
            made.append(serve(bundles(operators, form), operators, mine, LENGTH))
    more = {
        "chats": golden.chats(),
        "tokenizers": golden.tokenizers(path.parent),
        "conversation": golden.conversation(bundles("native", "int4"), path.parent),
    }
    path.write_text(json.dumps({"library": str(native_library().path), "bundles": made, **more}), "utf-8")
    return sum(len(one["cases"]) for one in made)


@pytest.mark.usefixtures("native")
def test_every_method_writes_what_python_writes(bundles: Callable[..., Path], tmp_path: Path) -> None:
    need_maven()
    path = tmp_path / "golden.json"
    assert write_golden(bundles, path) >= 2 * len(ways())
    ran = run_tests(golden=str(path), onnxruntime=str(same_onnxruntime(tmp_path)))
    assert ran.tests >= 20, ran.output
    assert ran.skipped == 0, ran.output
