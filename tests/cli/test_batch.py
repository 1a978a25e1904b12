"""A file of prompts, a file of answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from tests.cli.conftest import ROOT, Command
from tests.conftest import PROMPTS, THREADS

LENGTH = 12
TEXTS = [PROMPTS[at % len(PROMPTS)] + f" {at}" for at in range(11)]


def write(file: Path, items: list[Any]) -> Path:
    lines = (item if isinstance(item, str) else json.dumps(item) for item in items)
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", [{"prompt": text, "id": f"n{at}"} for at, text in enumerate(TEXTS)])


def asked(bundle: Path, source: Path, output: Path, *more: object) -> tuple[object, ...]:
    wanted = ("--threads", THREADS, "--max-new-tokens", LENGTH, "--batch", 3, "--method", "ngram")  # auto asks a clock
    return ("run", bundle, "--input", source, "--output", output, *wanted, *more)


@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_answers_are_those_of_each_prompt_alone_and_in_order(
    command: Command, demo: Path, prompts: Path, tmp_path: Path, method: str
) -> None:
    output = tmp_path / "answers.jsonl"
    made = command(*asked(demo, prompts, output, "--method", method, "--json"))
    assert made.json | {"tokens": 0} == {
        "input": str(prompts), "output": str(output), "prompts": 11, "answered_before": 0, "answered": 11, "failed": 0,
        "tokens": 0,
    }  # fmt: skip
    engine = load(demo, threads=THREADS)
    found = read(output)
    assert [one["text"] for one in found] == [engine.generate(text, max_new_tokens=LENGTH).text for text in TEXTS]
    assert [(one["index"], one["id"]) for one in found] == [(at, f"n{at}") for at in range(11)]
    assert made.json["tokens"] == sum(one["tokens"] for one in found)
    assert all(one["exact"] for one in found)


def test_it_goes_on_where_it_was_ended(command: Command, demo: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    assert command(*asked(demo, prompts, output)).code == 0
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:4]) + lines[4][:9])  # killed within a line
    again = command(*asked(demo, prompts, output, "--json"))
    assert (again.json["answered_before"], again.json["answered"]) == (4, 7)
    assert output.read_bytes() == whole
    assert command(*asked(demo, prompts, output, "--json")).json["answered"] == 0
    command(*asked(demo, prompts, output, "--temperature", 1)).refused(1, "other prompts, or of another bundle")
    write(prompts, [{"prompt": "other"}])
    command(*asked(demo, prompts, output)).refused(1, "other prompts, or of another bundle")
    assert output.read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_run_loses_no_answer(demo: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "prompts.jsonl", [{"prompt": f"{text} {at}"} for at in range(40) for text in TEXTS])
    output = tmp_path / "answers.jsonl"
    words = [sys.executable, "-m", "edgespec", *map(str, asked(demo, source, output))]
    running = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (output.exists() and output.read_bytes().count(b"\n") > 5):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = output.read_bytes()
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0
    after = output.read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    assert [one["index"] for one in read(output)] == list(range(440))


def test_what_cannot_be_answered_is_said_and_the_others_go_on(command: Command, chatty: Path, tmp_path: Path) -> None:
    items = [
        {"messages": [{"role": "user", "content": "how long?"}], "id": {"any": 1}},
        "no json",
        {"prompt": ""},
        {"prompt": "a", "messages": []},
        {"prompt": "a b " * 4000},
        {"prompt": "a", "seed": "x"},
        {"prompt": "the end", "seed": 3},
    ]
    output = tmp_path / "answers.jsonl"
    result = command(*asked(chatty, write(tmp_path / "in.jsonl", items), output, "--temperature", 1.0))
    result.refused(1, "5 of 7 prompts failed")
    found = read(output)
    assert ["error" in one for one in found] == [False, True, True, True, True, True, False]
    assert found[0]["id"] == {"any": 1}
    assert all("line" in one["error"]["message"] for one in found[1:6])
    drawn = load(chatty, threads=THREADS).generate("the end", max_new_tokens=LENGTH, temperature=1.0, seed=3)
    assert found[6]["text"] == drawn.text


def test_answers_follow_a_grammar(command: Command, demo: Path, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    output = tmp_path / "answers.jsonl"
    assert command(*asked(demo, prompts, output, "--regex", "(yes|no)")).code == 0
    assert {one["text"] for one in read(output)} <= {"yes", "no"}


@pytest.mark.parametrize("more, code, part", [
    (("--output", "x"), 2, "belong together"),
    (("--input", "none.jsonl", "--output", "x"), 1, "cannot be read"),
    (("--input", "none.jsonl", "--output", "x", "--prompt", "y"), 2, "leave --prompt"),
])  # fmt: skip
def test_wrong_files(command: Command, demo: Path, more: tuple[str, ...], code: int, part: str) -> None:
    command("run", demo, *more).refused(code, part)
    if code == 1:  # before anything is loaded
        command("run", "builtin:none", *more).refused(code, part)


def test_an_output_that_is_a_folder_is_named(command: Command, demo: Path, prompts: Path, tmp_path: Path) -> None:
    command(*asked(demo, prompts, tmp_path)).refused(1, f"{tmp_path}: cannot be written", "name another file")


def test_lines_are_those_of_the_file_and_a_batch_changes_no_answer(
    command: Command, demo: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "answers.jsonl"
    text = '{"prompt": "a\u2028b\u0085c"}\r\n\r\n{"prompt": "d"}\r\n{"prompt": 5}'
    source.write_bytes(b"\xef\xbb\xbf" + text.encode())
    made = command(*asked(demo, source, output, "--json"))
    assert made.code == 1
    said = json.loads(made.out)  # one object and no other
    assert (said["answered"], said["failed"]) == (2, 1)
    assert "1 of 3 prompts failed" in made.err
    assert read(output)[2]["error"]["message"].startswith("line 4:")
    again = command(*asked(demo, source, output, "--batch", 1, "--json"))
    assert json.loads(again.out)["answered_before"] == 3


def test_prompts_come_from_stdin(command: Command, demo: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    assert command(*asked(demo, Path("-"), output), stdin='{"prompt": "a"}\n').code == 0
    assert len(read(output)) == 1
    command(*asked(demo, Path("-"), Path("-")), stdin='{"prompt": "a"}\n').refused(1, "--output -")
