"""edgespec's own server, honest and with faults planted: the judge finds the difference."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli
from edgespec.judge.client import Answer, Server, Token
from edgespec.judge.greedy import Comparison, Difference, compare
from edgespec.judge.judging import PROMPTS, Judgement, Options, judge
from edgespec.judge.page import write_page
from edgespec.judge.recipes import RECIPES
from edgespec.judge.rows import Noise
from edgespec.judge.sampled import OTHER, Plan, cells
from tests.judge.canned import canned
from tests.judge.faults import FAULTS, PLAIN, SPECULATIVE, generous, hot, rounded, serving

FAST = Plan(draws=640, prompts=1, seconds=600, temperatures=(0.75,), lanes=2)
CHOSEN = (PROMPTS[7], *PROMPTS[:3])


@pytest.fixture(scope="module")
def url(bundles: Callable[..., Path], native: None) -> Iterator[str]:
    with serving(bundles("native", "int8")) as found:
        yield found


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests seeds from one sequence: those of a round are alike, so their draws are the same in every run."""
    monkeypatch.setattr("edgespec.decoding.noise.os", SimpleNamespace(urandom=random.Random(5).randbytes))


def judged(url: str, plan: Plan | None = FAST, own: bool = False) -> Judgement:
    server, plain = Server(url, fields=SPECULATIVE), Server(url, fields=PLAIN)
    return judge(server, None if own else plain, CHOSEN, Options(24, 2, 1, plan=plan), lambda *_: None, PLAIN)


def test_an_honest_server_is_identical(url: str) -> None:
    found = judged(url, FAST)
    assert found.verdict == "identical", found.line
    assert found.noise.largest == 0  # native operators give the same bits
    (sampled,) = found.sampled
    assert sampled.reported == "before"
    assert {test.name for test in sampled.tests} == {"counts", "prompt", "sharpness"}
    assert sampled.excess is not None
    assert found.forced is not None
    assert found.forced.places > 0


@pytest.mark.parametrize("fault", ["a row of the cache read from the wrong place", "the bonus token off by one"])
@pytest.mark.parametrize("own", [False, True])
def test_greedy_faults_are_wrong(url: str, fault: str, own: bool) -> None:
    with FAULTS[fault]():
        found = judged(url, None, own)
    assert found.verdict == "wrong", found.line
    if not own:
        assert found.greedy[0].verdict == "wrong"
        assert found.greedy[0].differences[0].margin is not None


# larger than those that `tools/planted_faults.py` plants, so that few draws find them
@pytest.mark.parametrize("fault", [lambda: generous(3.0), lambda: hot(1.5)])
def test_faults_of_sampling_are_wrong_and_their_greedy_texts_are_not(url: str, fault: Callable[[], Any]) -> None:
    with fault():
        found = judged(url)
    assert found.greedy[0].verdict == "identical"
    (sampled,) = found.sampled
    assert sampled.reference == "rows", sampled
    assert sampled.verdict == "wrong", sampled


def test_rows_with_guesses_that_are_rounded_otherwise_are_no_fault(url: str) -> None:
    with rounded():
        found = judged(url)
    assert found.verdict != "wrong", found.line
    assert found.drift is not None
    assert found.drift.largest > 0.1
    assert any("rows of the same text differ" in note for note in found.notes)


def test_without_log_probabilities_draws_are_compared_with_draws(url: str) -> None:
    def quiet(fields: dict[str, Any]) -> Server:
        server = Server(url, fields=fields | {"logprobs": None})
        return server

    def run(fault: Any) -> Judgement:
        with fault:
            return judge(quiet(SPECULATIVE), quiet(PLAIN), CHOSEN, Options(24, 2, 1, plan=FAST),
                         lambda *_: None)  # fmt: skip

    found = run(nullcontext())
    assert found.verdict == "identical"
    assert found.sampled[0].reference == "draws"
    assert any("no log-probabilities" in note for note in found.notes)
    assert run(FAULTS["the bonus token off by one"]()).verdict == "wrong"


def answer(*tokens: tuple[str, dict[str, float]]) -> Answer:
    made = tuple(Token(text, top) for text, top in tokens)
    return Answer("".join(text for text, _ in tokens), made, False, None, None, len(made), 1.0)


@pytest.mark.parametrize("gap, verdict", [(0.001, "near-ties"), (0.05, "near-ties"), (0.5, "wrong")])
def test_rounding_is_no_fault(gap: float, verdict: str) -> None:
    one = answer(("x", {"x": 0.0}), ("a", {"a": -0.5, "b": -0.5 - gap}))
    two = answer(("x", {"x": 0.0}), ("b", {"b": -0.5, "a": -0.5 - gap}))
    found = compare("it", Server("http://127.0.0.1:9", "m"), ["?"], [one], [two], Noise(1, 0.02))
    assert found.verdict == verdict
    (difference,) = found.differences
    assert (difference.position, difference.expected, difference.got) == (1, "a", "b")
    assert difference.margin == pytest.approx(gap)


@pytest.mark.parametrize("drawn, near_tie", [([" cat"] * 96, False), ([" cat", " dog"] * 48, None), ([" "] * 96, None)])
def test_without_log_probabilities_a_token_that_never_comes_is_no_near_tie(
    drawn: list[str], near_tie: bool | None
) -> None:
    left = list(drawn)

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["prompt"] == "Say: the"
        return 200, {"choices": [{"text": left.pop(), "finish_reason": "length"}]}

    texts = [Answer(text, (), False, None, None, 3, 1.0) for text in ("the cat sat", "the dog sat")]
    with canned(reply) as url, closing(Server(url, "m")) as server:
        found = compare("it", server, ["Say: "], texts[:1], texts[1:], Noise())
    (difference,) = found.differences
    assert difference.near_tie is near_tie
    assert found.verdict == ("wrong" if near_tie is False else "near-ties")


def test_cells_of_a_row() -> None:
    row = {"a": -0.5, "b": -1.5, "<end>": -3.0}
    after = cells(row, 0.5, before=False)
    assert set(after) == {"a", "b", OTHER}
    assert sum(after.values()) == pytest.approx(1)
    before = cells(row, 0.5, before=True)
    assert before["b"] / before["a"] == pytest.approx(2.718281828**-2)
    assert sum(before.values()) == pytest.approx(1)


KEYS = {"edgespec", "verdict", "line", "server", "against", "plain", "noise", "drift", "greedy", "forced", "sampled",
        "speed", "notes", "seconds"}  # fmt: skip
SAMPLED = {"temperature", "reported", "reference", "texts", "draws", "cut", "tests", "excess", "temperature_error",
           "notes", "verdict", "power"}  # fmt: skip


def test_the_command_prints_a_line_and_writes_json_and_a_page(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('ROMEO:\n"The \\u0041"\n{"prompt": "And so"}\n', "utf-8")
    page = tmp_path / "page.html"
    command = ["judge", url, "--fields", json.dumps(SPECULATIVE), "--plain", json.dumps(PLAIN),
               "--prompts", str(prompts),
               "--max-new-tokens", "8", "--repeats", "1", "--draws", "64"]  # fmt: skip
    found = CliRunner().invoke(cli, [*command, "--json", "--report", str(page)])
    assert found.exit_code == 0, found.output
    body = json.loads(found.stdout)
    assert set(body) == KEYS
    assert body["verdict"] == "identical"
    assert set(body["greedy"][0]) == {"what", "prompts", "equal", "tokens", "agreed", "differences", "verdict"}
    assert body["greedy"][0]["prompts"] == 3
    assert [one["temperature"] for one in body["sampled"]] == [0.6, 1.0]
    assert set(body["sampled"][0]) == SAMPLED
    assert any("draws find" in note for note in body["notes"])  # 64 texts are few
    assert "<h1" in page.read_text("utf-8")
    with FAULTS["the bonus token off by one"]():
        found = CliRunner().invoke(cli, [*command, "--duration", "0", "--report", str(page)])
    assert found.exit_code == 1
    assert "WRONG" in found.stdout.splitlines()[-1]
    assert "not a near-tie" in page.read_text("utf-8")


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "URL or --command"),
        (["http://127.0.0.1:9", "--command", "x {port}"], "URL or --command"),
        (["http://127.0.0.1:9", "--plain", "[1]"], "expected an object"),
        (["http://127.0.0.1:9", "--plain", "{"], "not JSON"),
        (["http://127.0.0.1:9", "--against", "http://127.0.0.1:9", "--plain", '{"a": 1}'], "expected one of"),
        (["http://127.0.0.1:9"], "no answer"),
        (["--command", "no-such-program {port}"], "cannot be started"),
    ],
)
def test_usage(words: list[str], told: str) -> None:
    found = CliRunner().invoke(cli, ["judge", *words])
    assert found.exit_code == 2
    assert told in found.output


def test_strict_refuses_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Judgement(Server("http://127.0.0.1:9", "m"), None, {})
    made.greedy = [Comparison("it", 1, 0, 2, 1, [Difference(0, 1, "a", "b", 0.01, near_tie=True)])]
    monkeypatch.setattr("edgespec.judge.judging.judge", lambda *_: made)
    assert CliRunner().invoke(cli, ["judge", "http://127.0.0.1:9"]).exit_code == 0
    assert CliRunner().invoke(cli, ["judge", "http://127.0.0.1:9", "--strict"]).exit_code == 1


def test_recipes_are_commands_with_a_port() -> None:
    asked = {"llama-server", "llama-cpp-python", "vllm", "sglang", "ollama", "mlx-lm", "litert-lm", "openvino",
             "onnxruntime-genai", "transformers", "edgespec"}  # fmt: skip
    assert asked == set(RECIPES)
    for name, recipe in RECIPES.items():
        found = CliRunner().invoke(cli, ["judge", "--recipe", name])
        assert found.exit_code == 0
        assert "{port}" in found.output
        assert ("untried" in found.output) == (not recipe.tried)


def test_a_page_of_everything_escapes_what_models_write(tmp_path: Path) -> None:
    made = Judgement(Server("http://127.0.0.1:9", "m"), Server("http://127.0.0.1:9", "m"), {})
    made.greedy = [Comparison("it", 1, 0, 2, 1, [Difference(0, 1, "<script>", "\ud800", None)])]
    write_page(tmp_path / "page.html", made)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script>" not in page
    assert "unknown" in page
