"""Untrusted templates and tokenizers run under limits, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.text import sandbox_process
from edgespec.runtimes.text.chat import render
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.sandbox_process import SandboxError, render_sandboxed
from tests.support import hf

MESSAGES = [{"role": "user", "content": "hello"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ROOT = Path(__file__).resolve().parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and processor time are Linux's")


def test_one_process_answers_all() -> None:
    assert render_sandboxed(PLAIN, {"messages": MESSAGES}) == "user: hello"
    first = sandbox_process._process
    assert render_sandboxed("{{ 1 + 1 }}", {}) == "2"
    assert sandbox_process._process is first


def test_values_arrive_as_they_are() -> None:
    values = {"given": (1, 2.5, None, True, "\u00e9\ud83d\ude00"), "by": {1: "one"}}
    assert render_sandboxed("{{ given }} {{ by[1] }}", values) == f"{values['given']} one"


@linux
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ messages | tojson(indent=10**10) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    ],
)
def test_a_template_without_bounds_is_refused_and_the_next_one_runs(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_process, "RENDER_SECONDS", 2)
    with pytest.raises(InvalidRequest, match=r"refuses these messages: (it needs more than|maximum recursion)"):
        render(template, MESSAGES)
    assert render(PLAIN, MESSAGES) == "user: hello"


def test_a_text_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="writes 20000000 characters"):
        render_sandboxed("{% for i in range(20) %}{{ 'a' * 1000000 }}{% endfor %}", {})
    monkeypatch.setattr(sys, "executable", "")  # Python inside another program: the same function, without a process
    assert render_sandboxed(PLAIN, {"messages": MESSAGES}) == "user: hello"


def test_a_process_that_was_killed_is_started_again() -> None:
    render_sandboxed("{{ 1 }}", {})
    assert sandbox_process._process is not None
    sandbox_process._process._child.kill()
    sandbox_process._process._child.wait()
    assert render_sandboxed("{{ 2 }}", {}) == "2"


FORKED = """
import os, sys
from edgespec.runtimes.text.sandbox_process import render_sandboxed
assert render_sandboxed("{{ 1 }}", {}) == "1"
child = os.fork()
assert render_sandboxed("{{ 2 + n }}", {"n": int(child == 0)}) == ("2" if child else "3")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_one_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- tokenizers --------------------------------------------------------------------------------------------------------


def tokenizer_with(folder: Path, **changes: object) -> Path:
    hf.write_tokenizer(folder, hf.CORE["llama_tied_gqa"])
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")
    return folder


def test_a_tokenizer_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    folder = tokenizer_with(tmp_path)
    TextCodec(folder)
    assert len(list((cache_folder() / "tokenizers").iterdir())) == 1
    monkeypatch.setattr("edgespec.runtimes.text.codec.try_tokenizer", None)
    TextCodec(folder)


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
MANY = {"type": "Replace", "pattern": {"String": "a"}, "content": "b1" * 20}


@linux
@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 40}},
        {"normalizer": MANY},
        {"normalizer": {"type": "NoSuch"}},
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": []}},
    ],
)
def test_a_tokenizer_without_bounds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    folder = tokenizer_with(tmp_path, **changes)
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a readable tokenizer"):
        TextCodec(folder)
    assert not (cache_folder() / "tokenizers").exists()  # it is not remembered as sound
