"""``edgespec verify``, and commands whose texts it is for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.verify import Accept, RowSampler
from edgespec.reports import proof as running
from edgespec.runtimes.files import checked
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.ort.native_library import native_library
from edgespec.version import __version__
from tests.cli.conftest import Command, export
from tests.conftest import TARGET
from tests.support.wide import wide_bundle

QUICK = ("--max-prompts", 3, "--max-new-tokens", 32)
DRAFTING = ["ngram", "speculative", "self-spec"]


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return acceptance that believes every draft."""

    def believe(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept) -> Verdict:
        return Verdict(range(len(proposal)), rows.choose(len(proposal)))

    monkeypatch.setattr("edgespec.decoding.loop.verify", believe)


def test_a_good_bundle_passes(command: Command, demo: Path) -> None:
    result = command("verify", demo, "--max-new-tokens", 40)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[:3] == [f"{name}: exact: 8 of 8 prompts equal, 320 tokens compared" for name in DRAFTING]
    assert lines[3] == "golden vectors: 8 of 8 reproduced on this machine"
    assert lines[4].startswith("checked: SHA-256 of ")
    assert lines[5:] == ["passed"]
    assert result.err.startswith("load: ")
    assert "\nverify: " in result.err


def test_json(command: Command, demo: Path) -> None:
    made = command("verify", demo, *QUICK, "--json").json
    assert list(made) == ["bundle", "strict", "passed", "checked", "golden", "methods"]
    assert list(made["checked"]) == ["files", "bytes", "onnxruntime", "native", "unverified"]
    assert (made["bundle"], made["strict"], made["passed"]) == (str(demo), True, True)
    assert made["golden"] == {"same": 8, "of": 8, "required": True, "reason": ""}
    assert [proof["method"] for proof in made["methods"]] == DRAFTING
    for proof in made["methods"]:
        assert (proof["prompts"], proof["equal"], proof["tokens"]) == (3, 3, 96)
        assert (proof["exact"], proof["lossless"], proof["differences"]) == (True, True, [])


@pytest.mark.parametrize("more", [(), ("--num-draft-tokens", 7), ("--top-p", 0.9, "--repetition-penalty", 1.2)])
def test_sampling_is_proven_by_coupling(command: Command, demo: Path, more: tuple[object, ...]) -> None:
    sampled = ("--temperature", 0.8, "--seed", 1, "--acceptance", "coupled")
    assert command("verify", demo, *QUICK, *sampled, *more, "--json").json["passed"] is True


@pytest.mark.parametrize("more", [(), ("--seed", 1), ("--acceptance", "coupled")])
def test_sampling_without_coupling_cannot_be_compared(command: Command, demo: Path, more: tuple[object, ...]) -> None:
    command("verify", demo, "--temperature", 0.8, *more).refused(2, "only with --seed N and --acceptance coupled")


def test_without_strict_only_near_ties_may_differ(command: Command, demo: Path) -> None:
    made = command("verify", demo, "--max-new-tokens", 32, "--no-strict", "--json").json
    assert (made["strict"], made["passed"]) == (False, True)
    assert (made["golden"]["same"], made["golden"]["of"]) == (0, 0)


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch acceptance so that every draft ends with a token that was not proposed."""

    def invent(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept) -> Verdict:
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


def altered(folder: Path, demo: Path, change: Callable[[dict[str, Any], Path], None]) -> Path:
    """Copy a bundle with a change, and update all hashes to match."""
    other = Path(shutil.copytree(demo, folder / "other"))
    file = other / "edgespec.json"
    manifest = json.loads(file.read_text("utf-8"))
    change(manifest, other)
    for name in manifest["files"]:
        manifest["files"][name] = {"size": (other / name).stat().st_size, "sha256": sha256(other / name)}
    file.write_text(json.dumps(manifest), "utf-8")
    return other


def other_weights(_: dict[str, Any], folder: Path) -> None:
    content = bytearray((folder / "model.data").read_bytes())
    content[: len(content) // 3] = bytes(value ^ 0x11 for value in content[: len(content) // 3])
    (folder / "model.data").write_bytes(content)


def other_golden(manifest: dict[str, Any], _: Path) -> None:
    manifest["golden"][0]["tokens"][-1] += 1


def of_another_processor(manifest: dict[str, Any], _: Path) -> None:
    other_golden(manifest, _)
    manifest["provenance"]["golden"] = {"operators": "stock", "processor": "another", "onnxruntime": "0"}


@pytest.fixture(scope="module", params=["native", "stock"])
def made_here(
    request: pytest.FixtureRequest, native: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Make a bundle for these operators."""
    layout = request.param
    return export(tmp_path_factory.mktemp("made") / layout, TARGET, "--operators", layout), layout


@pytest.mark.parametrize("change", [None, other_weights, other_golden])
def test_golden_vectors_that_are_not_reproduced_fail(
    command: Command, made_here: tuple[Path, str], tmp_path: Path, change: Any
) -> None:
    """Nothing else identifies a rebuilt bundle as a different one."""
    made, layout = made_here
    check = ("verify", altered(tmp_path, made, change) if change else made, *QUICK, "--operators", layout)
    result = command(*check)
    if change is None:
        assert result.code == 0
        return
    assert result.code == 1
    assert " of 8 reproduced on this machine: DIFFERENT: the bits are those of the export here, so" in result.out
    assert result.out.endswith("FAILED\n")
    told = json.loads(command(*check, "--json").out)
    assert (told["passed"], told["golden"]["required"]) == (False, True)
    assert told["golden"]["same"] < told["golden"]["of"] == 8


def test_golden_vectors_of_another_processor_are_reported_only(command: Command, demo: Path, tmp_path: Path) -> None:
    """ONNX Runtime's operators round by processor and version."""
    other = altered(tmp_path, demo, of_another_processor)
    result = command("verify", other, *QUICK, "--method", "ngram", "--operators", "stock")
    assert result.code == 0
    assert "they come from processor another, and this is " in result.out


def test_files_are_read_again_whatever_is_remembered(
    command: Command, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that changes a byte, and no time."""
    other = Path(shutil.copytree(demo, tmp_path / "other"))
    taken = checked.take_digest
    monkeypatch.setattr(checked, "QUIET", -60.0)
    command("info", other)
    monkeypatch.setattr(checked, "take_digest", lambda path: taken(path)._replace(sha256="0" * 64))
    monkeypatch.setattr(checked, "_keeps_times", lambda _: True)
    command("verify", other, *QUICK).refused(1, "altered", "hint: ")


def test_what_was_not_checked_is_not_proven(command: Command, demo: Path, tmp_path: Path) -> None:
    command("verify", demo, "--no-check").refused(2, "verify needs to compare the files")
    other = Path(shutil.copytree(demo, tmp_path / "other"))
    (other / "chat_template.jinja").write_text("x", "utf-8")
    result = command("verify", other, *QUICK, "--method", "ngram")
    assert result.code == 1
    assert "UNVERIFIED: chat_template.jinja is in the folder, but the manifest does not list it" in result.out


@pytest.mark.parametrize("version", ["", "0.0.1"])
def test_native_operators_of_another_version_fail(
    command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch, native: None, version: str
) -> None:
    library = replace(native_library(), version=version)
    monkeypatch.setattr(running, "native_library", lambda: library)
    shown = f"native operators of version {version or 'unknown'}: expected {__version__}"
    command("verify", demo, *QUICK, "--operators", "native").refused(1, shown, "install edgespec again")


def test_golden_vectors_that_do_not_fit_are_left_out(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("My\n", "utf-8")
    wanted = ("verify", demo, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 4)
    assert command(*wanted, "--context", 12, "--json").json["golden"]["of"] == 0
    assert "golden" not in command(*wanted, "--context", 12).out


def test_wrong_input(command: Command, demo: Path, tmp_path: Path) -> None:
    command("verify", demo, "--method", "magic").refused(1, "'magic' is not in this bundle", "hint: ")
    command("verify", demo, "--prompts", tmp_path / "none").refused(1, "cannot read prompts", "hint: ")
    command("verify", demo, "--gamma", 0).refused(1, "gamma is 0", "method ar")
    command("verify", tmp_path).refused(1, "expected a bundle", "hint: ")


@pytest.mark.parametrize("lossy", [("--accept", "typical"), ("--accept", "all")])
def test_a_lossy_rule_has_nothing_to_prove(command: Command, demo: Path, lossy: tuple[object, ...]) -> None:
    command("verify", demo, *lossy).refused(2, "nothing to prove")


SHORT = ("--prompt", "ROMEO:", "--max-new-tokens", 40, "--no-fallback", "--operators", "stock", "--json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle for swift: no search at export."""
    return export(tmp_path_factory.mktemp("swift") / "bundle", TARGET, "--method", "swift", "--operators", "stock")


def test_swift_writes_the_same_text_and_its_sets_can_be_forgotten(
    command: Command, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    plain = command("run", made, *SHORT, "--method", "ar").json
    found = command("run", made, *SHORT, "--method", "swift").json
    assert found["tokens"] == plain["tokens"]
    assert "sets tried" in "; ".join(found["details"])
    result = command("info", made, "--forget-skip-sets")
    assert result.code == 0
    assert "files deleted" in result.err
    assert not list((tmp_path / "skip-sets").glob("*.json"))


def test_a_chain_writes_the_same_text(command: Command, made: Path) -> None:
    plain = command("run", made, *SHORT, "--method", "ar").json
    for wanted in (("--method", "chain"), ("--set", "proposers=swift,ngram")):
        found = command("run", made, *SHORT, *wanted).json
        assert found["tokens"] == plain["tokens"]
        assert found["method_used"] == "chain"
    command("run", made, *SHORT, "--method", "chain", "--set", "proposers=self-spec").refused(
        1, "'self-spec' is not in this bundle", "export it with"
    )
    command("run", made, *SHORT, "--method", "chain", "--set", "proposers=nonsense").refused(
        1, "an entry point in edgespec.drafters"
    )
    command("run", made, *SHORT, "--method", "ar", "--set", "proposers=ngram").refused(2, "belongs to --method chain")


STOCK = ("--operators", "stock", "--max-new-tokens", 90)


def asked(folder: Path) -> tuple[str, Path]:
    (folder / "prompts.txt").write_text("the boat that\nThere was nothing left to do but wait\n", "utf-8")
    return "--prompts", folder / "prompts.txt"


def test_a_bundle_whose_rows_differ(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    differing = wide_bundle(tmp_path / "differing", exact=False)
    (tmp_path / "cache" / "rows.json").unlink(missing_ok=True)  # an export opens what it wrote
    assert "tried when it is first opened here" in command("info", differing).out
    assert command("info", differing, "--json").json["operators"]["exact_rows"] is None
    done = command("verify", differing, *STOCK, *asked(tmp_path))
    assert done.code == 0
    assert "near-ties may differ" in done.err
    assert done.out.endswith("passed\n")
    assert command("verify", differing, *STOCK, *asked(tmp_path), "--json").json["strict"] is False
    assert "near-ties may differ" in command("info", differing).out
    assert command("info", differing, "--json").json["operators"]["exact_rows"] is False
