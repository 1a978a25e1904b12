"""Device profiles: what is kept of them, and when they no longer hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ProfileError
from edgespec.planning import profiles
from edgespec.planning.profiles import (
    find_profile,
    kept_profiles,
    latest_profile,
    manifest_hash,
    profile_folder,
    profile_path,
    read_profile,
    save_profile,
    staleness,
    this_machine,
    why_none,
    write_profile,
)
from edgespec.runtimes.files.manifest import MANIFEST, Manifest, read_manifest
from edgespec.runtimes.options import LoadOptions, RunOptions
from tests.support.older import schema_5
from tests.support.planning import ELSEWHERE, manifest, profile, trial

HOW = LoadOptions(operators="native", threads=2)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: None) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


def where(bundle: Manifest) -> tuple[str, RunOptions]:
    """Make a bundle's name in the cache, and how it is run."""
    return manifest_hash(bundle), HOW.resolve(bundle)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return changes of this machine, as profiles see it."""
    known = this_machine()

    def change(**what: Any) -> None:
        monkeypatch.setattr(profiles, "this_machine", lambda device="cpu": known.model_copy(update=what))

    return change


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    made = profile(manifest(), trials={"ngram": trial()}, drafts={"medusa": {64: 0.5}})
    write_profile(made, tmp_path / "device.json")
    assert read_profile(tmp_path / "device.json") == made
    assert [file.name for file in tmp_path.iterdir()] == ["device.json"]


def test_trials_sum_up() -> None:
    made = trial(drafted_at=[50, 30, 0, 0], accepted_at=[30, 20, 0, 0])
    assert made.tokens_per_round == 1.5
    assert made.round_ms == 12.0
    assert made.acceptance == [0.6, pytest.approx(2 / 3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not readable as JSON"),
        (None, "cannot be read"),
        ('{"schema_version": 1, "mach', "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
        ("[1, 2]", "not a device profile"),
        ('{"schema_version": 2, "target": {}, "methods": {}}', "not a device profile"),
        ("{}", "not a device profile"),
        ('{"schema_version": "1", "machine": {}}', "not a device profile"),
        ('{"schema_version": 0, "machine": {}}', "schema 0, which is older"),
        ('{"schema_version": 99, "machine": {}}', "schema 99, which is newer"),
        ('{"schema_version": 1, "machine": {}}', "machine.processor: Field required"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "device.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert caught.value.hint
    assert str(path) in caught.value.message


@pytest.mark.parametrize("change", ["without", "unknown", "negative", "nan", "no passes"])
def test_profiles_with_a_wrong_part(tmp_path: Path, change: str) -> None:
    data = json.loads(profile(manifest()).model_dump_json())
    where = {"without": "bandwidth", "unknown": "typo", "negative": "bandwidth", "nan": "seconds"}.get(change, "passes")
    if change == "without":
        del data["bandwidth"]
    else:
        data[where] = {"unknown": 1, "negative": -1.0, "nan": float("nan"), "no passes": {}}[change]
    path = tmp_path / "device.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="NaN" if change == "nan" else where):
        read_profile(path)


def test_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be written"):
        write_profile(profile(manifest()), tmp_path / "none" / "device.json")


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found_by_its_manifest() -> None:
    bundle = manifest()
    assert find_profile(bundle, HOW) is None
    made = profile(bundle)
    path = save_profile(made)
    assert path.parent == profile_folder()
    assert find_profile(bundle, HOW) == made
    assert list(kept_profiles()) == [made]


def test_a_profile_of_schema_1_is_read(tmp_path: Path) -> None:
    """Its trials have another name of a key; Kotlin still writes it."""
    made = profile(manifest(), trials={"ngram": trial(drafted_at=[50, 30], accepted_at=[30, 20])})
    data = json.loads(made.model_dump_json())
    data["schema_version"] = 1
    data["trials"]["ngram"]["offered"] = data["trials"]["ngram"].pop("drafted_at")
    (tmp_path / "old.json").write_text(json.dumps(data), "utf-8")
    assert read_profile(tmp_path / "old.json") == made
    for wrong in (data | {"schema_version": 2}, data | {"trials": {"ngram": 3}}, data | {"trials": [1]}):
        (tmp_path / "old.json").write_text(json.dumps(wrong), "utf-8")
        with pytest.raises(ProfileError, match="trials"):
            read_profile(tmp_path / "old.json")


def test_another_way_or_bundle_is_another_profile() -> None:
    def kept(**change: Any) -> bool:
        return find_profile(manifest(), HOW.changed(**change)) is not None

    save_profile(profile(manifest()))
    assert kept()
    assert kept(strict=False)  # which distinguishes only stock operators' profiles
    assert not any((kept(threads=3), kept(operators="stock"), kept(attention="int8")))
    save_profile(profile(manifest(), operators="stock", attention="f32"))
    assert kept(operators="stock")
    assert not kept(operators="stock", strict=False)
    assert manifest_hash(manifest("int8")) != manifest_hash(manifest())
    assert find_profile(manifest("int8"), HOW) is None
    assert latest_profile(2) is not None  # any of this machine
    assert not kept(attention="nonsense")
    with pytest.raises(EdgespecError, match="unknown attention"):
        HOW.changed(attention="nonsense").resolve(manifest())


def test_a_bundle_with_the_old_names_of_keys_keeps_its_profile(tmp_path: Path) -> None:
    """Its hash is still that of its file, as Kotlin computes it, too."""
    for older in schema_5():
        (tmp_path / MANIFEST).write_text(json.dumps(older), "utf-8")
        text = json.dumps(older, ensure_ascii=False, separators=(",", ":"))
        assert manifest_hash(read_manifest(tmp_path)) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "x86_64 Other avx2"},
        {"cores": 99},
        {"onnxruntime": "2.0"},
        {"edgespec": "9"},
        {"isa": "scalar"},
        {"library": "other"},
    ],
)
def test_another_machine_is_another_profile(here: Callable[..., None], change: dict[str, Any]) -> None:
    bundle = manifest()
    save_profile(profile(bundle))
    here(**change)
    assert find_profile(bundle, HOW) is None
    assert latest_profile(2) is None
    (reason,) = why_none(*where(bundle), "bundle")
    assert str(next(iter(change.values()))) in reason or "other native operators" in reason


def test_more_memory_is_the_same_machine(here: Callable[..., None]) -> None:
    save_profile(profile(manifest()))
    here(memory=1 << 40)
    assert find_profile(manifest(), HOW) is not None


@pytest.mark.parametrize(
    "content", [b"", b'{"schema_version": 1, "machi', b"[]", b'{"schema_version": 7, "machine": {}}']
)
def test_rubbish_in_the_cache_is_no_profile(content: bytes) -> None:
    at = where(manifest())
    path = save_profile(profile(manifest()))
    assert path == profile_path(*at)
    path.write_bytes(content)
    assert find_profile(manifest(), HOW) is None
    assert latest_profile(2) is None
    (reason,) = why_none(*at, "bundle")
    assert reason.startswith("the profile that was kept is unusable")


def test_what_lies_under_a_profiles_name_is_not_believed() -> None:
    path = save_profile(profile(manifest()))
    write_profile(profile(manifest(), machine=ELSEWHERE), path)
    assert find_profile(manifest(), HOW) is None
    path.unlink()
    path.mkdir()
    assert find_profile(manifest(), HOW) is None


def test_the_latest_of_this_machine() -> None:
    for form, created in (("int4", "2026-03-01"), ("int8", "2026-05-01"), ("fp32", "2026-04-01")):
        save_profile(profile(manifest(form), created=created))  # type: ignore[arg-type]
    found = latest_profile(2)
    assert found is not None
    assert found.format == "int8"
    assert latest_profile(7) is None


# -- why not -----------------------------------------------------------------------------------------------------------


def test_a_profile_of_a_phone_says_so() -> None:
    reasons = staleness(profile(manifest(), machine=ELSEWHERE), *where(manifest()))
    assert any("measured on aarch64 Phone 1" in reason for reason in reasons)
    assert any("onnxruntime 1.99.0, here " in reason for reason in reasons)
    assert not staleness(profile(manifest()), *where(manifest()))


def test_every_difference_of_setting_is_a_reason() -> None:
    made, (bundle, run) = profile(manifest()), where(manifest())
    changes: tuple[dict[str, Any], ...] = ({"threads": 4}, {"operators": "stock"}, {"attention": "int8"})
    for change in changes:
        (reason,) = staleness(made, bundle, replace(run, **change))
        assert next(iter(change)) in reason
    (reason,) = staleness(made, "other", run)
    assert "another bundle" in reason


def test_a_profile_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "BUSY", 1.5)
    made = profile(manifest(), spread=1.49)
    assert not staleness(made, *where(manifest()))
    (reason,) = staleness(made.model_copy(update={"spread": 1.5}), *where(manifest()))
    assert "busy" in reason


def test_a_bundle_that_was_exported_again() -> None:
    save_profile(profile(manifest("int8")))
    assert why_none(*where(manifest("int4")), "bundle") == ["the bundle has changed"]
    assert why_none(*where(manifest("int4")), "another") == []


# -- this machine ------------------------------------------------------------------------------------------------------


def test_this_machine_is_described() -> None:
    found = this_machine()
    assert found.cores >= 1
    assert found.memory > 0
    assert found.isa
    assert len(found.library) == 16


def test_processors_by_their_name_and_what_kernels_need(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3GHz\nflags\t\t: fpu avx2 avx512f sse\n")
    assert profiles._processor(file).endswith("Some CPU @ 3GHz avx2 avx512f")
    file.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    assert profiles._processor(file).endswith("asimddp i8mm")
    assert profiles._processor(tmp_path / "none")
