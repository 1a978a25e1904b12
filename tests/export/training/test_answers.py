"""Training texts that a server of the same model writes: a real ``edgespec serve``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.errors import TrainingError
from tests.export.training.conftest import short
from tests.server.conftest import Served, start, stop

pytestmark = pytest.mark.usefixtures("torch", "fresh_accelerate")
MODEL = "builtin:shakespeare"
PROMPTS = [f"{name}:\n{word}" for name in ("ROMEO", "JULIET", "NURSE", "PARIS") for word in ("I", "What", "My lord")]


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("native")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    running = start(bundle, "--queue", "200")
    yield running
    stop(running)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), "utf-8")
    return path


def trained(output: Path, data: Path, url: str, **changes: Any) -> Any:
    from edgespec.export.training.train import Trainer

    options = replace(short(MODEL, output), self_distill=0, data=(data,), answers_from=url, **changes)
    return Trainer(options, changes.pop("report", None))


def test_greedy_answers_are_the_models_own_texts(server: Served, bundle: Path, data: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path / "out", data, server.url, greedy_fraction=1.0)
    trainer.state.begin({}, False, False)
    got = trainer._answered([])
    with load(bundle, threads=1) as engine:
        for prompt, answer in zip(PROMPTS, got, strict=True):
            own = engine.generate(prompt, method="ar", max_new_tokens=trainer.length)
            ids = engine.encode(prompt)
            assert answer[: len(ids)] == ids
            assert trainer.source.codec.decode(answer[len(ids) :]) == own.text


def test_a_training_on_answers_ends_and_says_so(server: Served, data: Path, tmp_path: Path) -> None:
    done = trained(tmp_path / "out", data, server.url + "/v1/").run()
    assert done.windows >= len(PROMPTS) - 1
    assert not (tmp_path / "out" / ".training").exists()


def test_what_came_before_an_interruption_is_not_asked_for_again(server: Served, data: Path, tmp_path: Path) -> None:
    from edgespec.export.training.answers import Answers, Server

    prompts, file = [[5, 6, number] for number in range(7, 27)], tmp_path / "answers.jsonl"
    seen: list[int] = []

    def interrupt(done: int, of: int) -> None:
        seen.append(done)
        if done == 6:
            raise KeyboardInterrupt

    answers = Answers(Server(server.url), prompts, file, 4, 0.5, 0)
    with pytest.raises(KeyboardInterrupt):
        answers.collect(interrupt)
    kept = file.read_text("utf-8")
    assert kept.count("\n") == 6
    file.write_text(kept + '{"number": 19, "te', "utf-8")  # a kill amid a line
    seen.clear()
    found = answers.collect(lambda done, of: seen.append(done))
    assert seen == list(range(6, 21))
    assert found == Answers(Server(server.url), prompts, tmp_path / "other.jsonl", 4, 0.5, 0).collect(lambda *_: None)


@pytest.mark.parametrize(
    ("url", "line", "said"),
    [
        ("http://127.0.0.1:9", '{"prompt": "a"}', "127.0.0.1:9: .*refused"),
        ("ftp://example.org", '{"prompt": "a"}', "expected a URL"),
        ("http://[", '{"prompt": "a"}', "answers-from"),
        (None, '{"prompt": "a"}', "status 404"),  # a model that it does not have
        (None, '{"text": "a"}', "cannot read prompts"),
        (None, "", "no prompts"),
    ],
)
def test_what_cannot_be_asked_is_an_error(
    url: str | None, line: str, said: str, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.export.training import answers

    monkeypatch.setattr(answers, "PAUSE", 0.01)
    (data := tmp_path / "prompts.jsonl").write_text(line + "\n", "utf-8")
    with pytest.raises(TrainingError, match=said):
        trained(tmp_path / "out", data, url or server.url, answers_model=None if url else "missing").run()
