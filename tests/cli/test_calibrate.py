"""``edgespec calibrate``: its output, its cache, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgespec.planning import profiles as machine
from edgespec.planning import profiles as profile_cache
from edgespec.planning import profiles as quiet
from edgespec.planning.profiles import Machine, Profile, Trial, find_profile, read_profile
from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import LoadOptions
from tests.cli.conftest import Command
from tests.conftest import THREADS

SHORT = ("--duration", "0.3", "--context", "200", "--threads", str(THREADS))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calibrated(command: Command, demo: Path, empty_cache: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fill the cache with the profile of ``calibrate demo SHORT``, measured once for all tests that begin with it."""
    cache, kept = profile_cache.profile_folder(), tmp_path_factory.getbasetemp() / "calibrated"
    if not kept.exists():
        assert command("calibrate", demo, *SHORT).code == 0
        shutil.copytree(cache, kept)
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(kept, cache)
    assert list(cache.iterdir())


def test_a_bundle_from_end_to_end(command: Command, demo: Path, tmp_path: Path) -> None:
    first = command("calibrate", demo, *SHORT, "--json")
    found = first.json
    assert list(found) == ["bundle", "cached", "reasons", "file", "profile"]
    assert (found["bundle"], found["cached"], found["reasons"]) == (str(demo), False, [])
    assert list(found["profile"]) == [
        "schema_version", "machine", "bundle", "name", "facts", "format", "head_format", "weight_bytes", "kv_bytes",
        "operators", "device", "threads", "attention", "strict", "context", "passes", "plain", "drafts", "first_drafts",
        "trials", "prompts", "prefill", "bandwidth", "spread", "others", "rows_exact", "process_bytes", "seconds",
        "notes", "created",
    ]  # fmt: skip
    assert list(found["profile"]["machine"]) == list(Machine.model_fields)
    assert set(found["profile"]["trials"]) == {"ar", "ngram", "speculative", "self-spec"}
    assert all(list(trial) == list(Trial.model_fields) for trial in found["profile"]["trials"].values())
    assert found["profile"]["process_bytes"] > 0
    assert found["profile"]["name"] == demo.resolve().name
    assert Path(found["file"]).is_file()
    assert "passes: depth 64" in first.err  # progress is not on stdout

    again = command("calibrate", demo, *SHORT, "--json")
    assert again.json == found | {"cached": True}
    assert again.err == ""

    forced = command("calibrate", demo, *SHORT, "--force", "--json").json
    assert (forced["cached"], forced["reasons"]) == (False, ["asked for"])
    assert forced["profile"]["passes"] != found["profile"]["passes"]
    assert forced["file"] == found["file"]


def test_what_people_see(command: Command, demo: Path, tmp_path: Path) -> None:
    output = tmp_path / "phone.json"
    first = command("calibrate", demo, *SHORT, "-o", output)
    assert first.code == 0
    for part in ("depth", "17 rows", "prefill", "self-spec", "ngram", "GB/s", "measured in", str(output)):
        assert part in first.out.replace("\n", "")
    made = read_profile(output)
    assert set(made.passes) == {64, 182}
    again = command("calibrate", demo, *SHORT, "-o", output)
    assert "kept since; --force measures again" in again.out
    assert read_profile(output) == made
    forced = command("calibrate", demo, *SHORT, "--force")
    assert "calibrating again: asked for" in forced.err


@pytest.mark.usefixtures("calibrated")
def test_a_longer_context_or_other_prompts_are_measured_again(command: Command, demo: Path, tmp_path: Path) -> None:
    longer = command("calibrate", demo, *SHORT, "--context", "300", "--json")
    assert longer.json["reasons"] == ["measured for a context of 200 tokens only"]
    assert command("calibrate", demo, *SHORT, "--json").json["cached"]  # it holds for a shorter one
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ROMEO:\nJULIET:\nThe\n")
    own = command("calibrate", demo, *SHORT, "--prompts", prompts, "--json")
    assert own.json["reasons"] == ["methods were tried on other prompts"]
    assert own.json["profile"]["prompts"]
    assert command("calibrate", demo, *SHORT, "--prompts", prompts, "--json").json["cached"]
    assert command("calibrate", demo, *SHORT, "--json").json["cached"]  # no other prompts were given


def test_what_a_busy_machine_gave_is_not_used(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "BUSY", 1.0)  # no machine is as steady
    first = command("calibrate", demo, *SHORT)
    assert "the machine was busy" in first.out
    assert "no use of this" in " ".join(first.out.split())
    assert find_profile(read_manifest(demo), LoadOptions(threads=THREADS, context=200)) is None
    again = command("calibrate", demo, *SHORT, "--json")
    assert "calibrating again" not in again.err  # its reasons are in the object
    assert (again.json["cached"], again.json["profile"]["spread"] >= 1) == (False, True)
    assert "the machine was busy" in again.json["reasons"][0]
    monkeypatch.setattr(quiet, "BUSY", 1e9)
    assert command("calibrate", demo, *SHORT, "--json").json["cached"]


@pytest.mark.usefixtures("calibrated")
def test_rubbish_in_the_cache_is_measured_again(command: Command, demo: Path) -> None:
    kept = command("calibrate", demo, *SHORT, "--json").json
    assert kept["cached"]
    file = Path(kept["file"])
    file.write_text(file.read_text()[:200])
    again = command("calibrate", demo, *SHORT)
    assert "the profile that was kept is unusable" in again.err
    Profile.model_validate_json(file.read_text())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_said_before_measuring(command: Command, demo: Path, tmp_path: Path) -> None:
    missing = command("calibrate", demo, *SHORT, "-o", tmp_path / "none" / "phone.json")
    missing.refused(1, "cannot be written", "there is no folder", "hint: ")
    command("calibrate", demo, *SHORT, "-o", tmp_path).refused(1, "is a folder")
    assert not list(profile_cache.profile_folder().glob("*"))


@pytest.mark.usefixtures("native")
def test_bad_input(command: Command, demo: Path, tmp_path: Path) -> None:
    command("calibrate", tmp_path / "none").refused(1, "no such bundle or model")
    command("calibrate", demo, "--context", str(10**9)).refused(1, "what the bundle was exported for")
    command("calibrate", demo, "--duration", "0").refused(2, "--duration")
    command("calibrate", demo, "--attention", "int4").refused(1, "--attention")
    command("calibrate", demo, "--prompts", tmp_path / "none.txt").refused(1, "cannot read prompts")


def test_a_device_that_is_not_there(
    command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(devices.LIBRARY, str(tmp_path / "none.so"))
    machine.this_machine.cache_clear()
    refused = command("calibrate", demo, "--device", "webgpu")
    refused.refused(1, "webgpu")
    machine.this_machine.cache_clear()
