"""``edgespec verify``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgespec.decoding.accept import Accept
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.rows import Rows
from tests.cli.conftest import Command

QUICK = ("--limit", 3, "--max-new-tokens", 32)
PROOF = {"method", "prompts", "tokens", "equal", "exact", "lossless", "differences"}
DRAFTING = ["ngram", "speculative", "self-spec"]


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance that believes every draft."""

    def believe(proposal: Proposal, rows: Rows, noise: Noise, accept: Accept) -> Verdict:
        return Verdict(range(len(proposal)), rows.choose(len(proposal)))

    monkeypatch.setattr("edgespec.decoding.loop.verify", believe)


def test_a_good_bundle_passes(command: Command, demo: Path) -> None:
    result = command("verify", demo, "--max-new-tokens", 40)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[:3] == [f"{name}: exact: 8 of 8 prompts equal, 320 tokens compared" for name in DRAFTING]
    assert lines[3:] == ["golden vectors: 8 of 8 reproduced on this machine", "passed"]
    assert result.err.startswith("verify: ")


def test_json(command: Command, demo: Path) -> None:
    made = command("verify", demo, *QUICK, "--json").json
    assert made.keys() == {"bundle", "strict", "passed", "golden", "methods"}
    assert (made["bundle"], made["strict"], made["passed"]) == (str(demo), True, True)
    assert made["golden"] == {"same": 8, "of": 8}
    assert [proof["method"] for proof in made["methods"]] == DRAFTING
    for proof in made["methods"]:
        assert proof.keys() == PROOF
        assert (proof["prompts"], proof["equal"], proof["tokens"]) == (3, 3, 96)
        assert (proof["exact"], proof["lossless"], proof["differences"]) == (True, True, [])


@pytest.mark.parametrize("more", [(), ("--gamma", 7), ("--top-p", 0.9, "--repetition-penalty", 1.2)])
def test_sampling_is_proven_by_coupling(command: Command, demo: Path, more: tuple[object, ...]) -> None:
    sampled = ("--temperature", 0.8, "--seed", 1, "--acceptance", "coupled")
    assert command("verify", demo, *QUICK, *sampled, *more, "--json").json["passed"] is True


@pytest.mark.parametrize("more", [(), ("--seed", 1), ("--acceptance", "coupled")])
def test_sampling_without_coupling_cannot_be_compared(command: Command, demo: Path, more: tuple[object, ...]) -> None:
    command("verify", demo, "--temperature", 0.8, *more).refused(2, "only with --seed N and --acceptance coupled")


def test_without_strict_only_near_ties_may_differ(command: Command, demo: Path) -> None:
    made = command("verify", demo, "--max-new-tokens", 32, "--no-strict", "--json").json
    assert (made["strict"], made["passed"]) == (False, True)
    assert made["golden"] == {"same": 0, "of": 0}


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance that ends every draft with a token that nobody proposed."""

    def invent(proposal: Proposal, rows: Rows, noise: Noise, accept: Accept) -> Verdict:
        return Verdict((), (rows.choose(0) + (len(proposal) > 0)) % 1024)

    monkeypatch.setattr("edgespec.decoding.loop.verify", invent)


def test_a_lossy_method_is_caught(command: Command, demo: Path, lossy: None) -> None:
    """However close its words are: in strict mode nothing may differ."""
    result = command("verify", demo, "--max-new-tokens", 32, "--method", "self-spec")
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0] == "self-spec: DIFFERENT: 0 of 8 prompts equal, 256 tokens compared"
    assert lines[1].startswith("  prompt 0, token ")
    assert lines[-1] == "FAILED"


@pytest.mark.parametrize("strict", [True, False])
def test_a_method_that_writes_something_else_is_caught(command: Command, demo: Path, wild: None, strict: bool) -> None:
    more = () if strict else ("--no-strict",)
    result = command("verify", demo, *QUICK, "--method", "self-spec", *more)
    assert result.code == 1
    assert "self-spec: DIFFERENT: 0 of 3 prompts equal" in result.out
    assert ": not a near-tie\n" in result.out
    assert "Traceback" not in result.err
    result = command("verify", demo, *QUICK, "--method", "self-spec", *more, "--json")
    assert (result.code, result.out.count("\n")) == (1, 1)
    made = json.loads(result.out)
    proof = made["methods"][0]
    assert (made["passed"], made["strict"], proof["exact"], proof["lossless"]) == (False, strict, False, False)
    assert len(proof["differences"]) == proof["prompts"] - proof["equal"]
    for item in proof["differences"]:
        assert item.keys() == {"prompt", "position", "expected", "got", "gap", "near_tie"}
        assert item["expected"] != item["got"]
        assert item["near_tie"] is False


def test_a_text_that_only_ends_early_is_caught(command: Command, demo: Path, lossy: None) -> None:
    """With a stop string one text may be the beginning of the other: JSON knows no infinity for the gap."""
    made = command("run", demo, "--prompt", "The", "--method", "ar", "--max-new-tokens", 32, "--json").json["text"]
    for at in range(0, len(made), 24):
        result = command("verify", demo, *QUICK, "--method", "self-spec", "--stop", made[at], "--json")
        assert "Infinity" not in result.out
        json.loads(result.out)


def test_golden_vectors_that_are_not_reproduced_are_reported_only(command: Command, demo: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(demo, tmp_path / "other"))
    manifest = json.loads((other / "edgespec.json").read_text("utf-8"))
    manifest["golden"][0]["tokens"][-1] += 1
    (other / "edgespec.json").write_text(json.dumps(manifest), "utf-8")
    result = command("verify", other, *QUICK, "--method", "ngram")
    assert result.code == 0
    assert "golden vectors: 7 of 8 reproduced" in result.out


def test_golden_vectors_that_do_not_fit_are_left_out(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("My\n", "utf-8")
    wanted = ("verify", demo, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 4)
    assert command(*wanted, "--context", 12, "--json").json["golden"] == {"same": 0, "of": 0}
    assert "golden" not in command(*wanted, "--context", 12).out


def test_wrong_input(command: Command, demo: Path, tmp_path: Path) -> None:
    command("verify", demo, "--method", "magic").refused(1, "'magic' is not in this bundle", "hint: ")
    command("verify", demo, "--prompts", tmp_path / "none").refused(1, "cannot read prompts", "hint: ")
    command("verify", demo, "--gamma", 0).refused(1, "gamma 0", "hint: ")
    command("verify", tmp_path).refused(1, "expected a bundle", "hint: ")


@pytest.mark.parametrize("lossy", [("--accept", "typical"), ("--set", "min-block=2")])
def test_a_lossy_rule_has_nothing_to_prove(command: Command, demo: Path, lossy: tuple[object, ...]) -> None:
    command("verify", demo, *lossy).refused(2, "nothing to prove")
