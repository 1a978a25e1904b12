"""Results are called exact and lossless only if that was checked; otherwise they explain why it is unknown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.cli.answer import result_lines, summary
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result, of_all
from edgespec.runtimes.files.cache import ORIGIN, cache_folder
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.files.session_file import LINE

PROMPT = "QUEEN MARGARET:\nWhat, "
OTHER: dict[Operators, Operators] = {"stock": "native", "native": "stock"}
Open = Callable[..., Engine]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a new cache and a new key; return their folder."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_KEY", str(tmp_path / "key"))
    return tmp_path


@pytest.fixture
def other(operators: Operators, request: pytest.FixtureRequest) -> Operators:
    """Those that the bundle's weights are converted for."""
    found = OTHER[operators]
    if found == "native":
        request.getfixturevalue("native")
    return found


@pytest.fixture
def copied(bundle: Callable[..., Path], own: Path) -> Path:
    """Copy the bundle of the test's operators, so that the test may change it."""
    return Path(shutil.copytree(bundle("int4"), own / "bundle"))


def ask(engine: Engine, prompt: str = PROMPT, **settings: Any) -> Result:
    return engine.generate(prompt, method="ngram", max_new_tokens=12, **settings)


def claims(result: Result) -> tuple[bool | None, bool | None]:
    return result.lossless, result.exact


def flip(file: Path, at: int = -64) -> None:
    """Another bit; size and time of modification stay."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# -- the bundle --------------------------------------------------------------------------------------------------------


def test_a_checked_bundle_is_proven(copied: Path, operators: Operators) -> None:
    result = ask(load(copied, threads=1, operators=operators))
    assert claims(result) == (True, True)
    assert result.unverified == []


def test_without_a_check_nothing_is_said(copied: Path, operators: Operators) -> None:
    flip(copied / "config.json")
    engine = load(copied, threads=1, operators=operators, check=False)
    result = ask(engine)
    assert claims(result) == (None, None)
    assert result.as_dict()["exact"] is None
    assert result.unverified == ["the files were not compared with their SHA-256 (no check)"]
    assert "UNVERIFIED: the files were not compared" in summary(result)
    assert "text         lossless: not known, exact: not known" in result_lines(result)
    lossy = ask(engine, accept="all")
    assert (lossy.lossless, lossy.exact) == (False, False) if lossy.stats.drafted else (None, None)


def test_a_file_that_is_changed_while_it_runs(copied: Path, operators: Operators) -> None:
    engine = load(copied, threads=1, operators=operators)
    assert claims(ask(engine)) == (True, True)
    flip(copied / "model.data")
    result = ask(engine)
    assert claims(result) == (None, None)
    assert result.unverified == ["model.data was changed, replaced or removed after it was checked"]
    assert engine.plain().unverified()


def test_a_template_that_the_manifest_does_not_list(copied: Path, operators: Operators) -> None:
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")
    result = ask(load(copied, threads=1, operators=operators))
    assert claims(result) == (None, None)
    assert result.unverified == ["chat_template.jinja is in the folder, but the manifest does not list it"]


# -- converted weights -------------------------------------------------------------------------------------------------


def converted() -> Path:
    (found,) = (path for path in cache_folder().iterdir() if path.name.endswith(("-stock", "-native")))
    return found


def test_changed_weights_in_the_cache_are_made_again(copied: Path, operators: Operators, other: Operators) -> None:
    good = ask(load(copied, threads=1, operators=other))
    assert claims(good) == (True, True)
    weights = converted() / f"model.{other}.data"
    sound = weights.read_bytes()
    for at in (-64, len(sound) // 2):
        flip(weights, at)
        assert weights.read_bytes() != sound
        result = ask(load(copied, threads=1, operators=other))
        assert weights.read_bytes() == sound
        assert (result.tokens, claims(result)) == (good.tokens, (True, True))


def test_weights_and_record_of_another_bundle_are_not_used(
    copied: Path, operators: Operators, other: Operators
) -> None:
    """An older cache that was copied back under the name of the newer one."""
    load(copied, threads=1, operators=other).close()
    folder = converted()
    sound = (folder / f"model.{other}.data").read_bytes()
    (folder / f"model.{other}.data").write_bytes(bytes(len(sound)))
    record = (folder / ORIGIN).read_text("utf-8")
    (folder / ORIGIN).write_text(record.replace('"sha256": "', '"sha256": "0'), "utf-8")
    load(copied, threads=1, operators=other).close()
    assert (folder / f"model.{other}.data").read_bytes() == sound


def test_a_graph_in_the_cache_is_the_bundles(copied: Path, operators: Operators, other: Operators) -> None:
    engine = load(copied, threads=1, operators=other)
    graph = converted() / engine.model.graph.file
    sound = graph.read_bytes()
    flip(graph)
    load(copied, threads=1, operators=other).close()
    assert graph.read_bytes() == sound


def test_without_a_key_converted_weights_run_and_say_so(
    copied: Path, operators: Operators, other: Operators, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a writable home, a process still trusts the weights that it converted."""
    (own / "blocked").write_text("in the way", "utf-8")
    monkeypatch.setenv("EDGESPEC_KEY", str(own / "blocked" / "key"))
    assert claims(ask(load(copied, threads=1, operators=other))) == (True, True)
    result = ask(load(copied, threads=1, operators=other))
    assert claims(result) == (None, None)
    assert result.unverified == ["converted weights in the cache cannot be checked: there is no key to seal them with"]
    assert claims(ask(load(copied, threads=1, operators=operators))) == (True, True)


# -- session files -----------------------------------------------------------------------------------------------------


def saved(engine: Engine, file: Path) -> Path:
    engine.save_session(file, PROMPT)
    return file


def resealed(file: Path) -> None:
    """Replace the keys, with a matching SHA-256: an attacker lacks the user's key."""
    import hashlib

    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[12:16], "little")
    body = np.frombuffer(data, np.uint8, offset=LINE + size)
    body[: len(body) // 2] ^= 1
    data[16:48] = hashlib.sha256(bytes(data[LINE:])).digest()
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["other keys", "another user"])
def test_a_foreign_session_proves_nothing(fresh: Open, own: Path, how: str) -> None:
    file = saved(fresh(), own / "a.session")
    if how == "other keys":
        resealed(file)
    else:
        (own / "key").unlink()
    engine = fresh()
    engine.restore_session(file)
    result = ask(engine, PROMPT + "is ")
    assert result.stats.reused_tokens
    assert claims(result) == (None, None)
    assert result.unverified == ["the session file a.session does not have this user's seal"]
    engine.save_session(own / "b.session", PROMPT)  # does not make it one's own
    other = fresh()
    other.restore_session(own / "b.session")
    assert claims(ask(other)) == (None, None)
    clean = ask(engine, "Farewell")  # nothing of it is left
    assert not clean.stats.reused_tokens
    assert claims(clean) == (True, True)
    assert clean.tokens == ask(fresh(), "Farewell").tokens
    again = ask(engine, "Farewell")
    assert again.stats.reused_tokens
    assert claims(again) == (True, True)
    assert ask(engine, PROMPT).tokens == ask(fresh(), PROMPT).tokens


def test_ones_own_session_is_proven(fresh: Open, own: Path) -> None:
    file = saved(fresh(), own / "a.session")
    engine = fresh()
    engine.restore_session(file)
    result = ask(engine, PROMPT + "is ")
    assert result.stats.reused_tokens
    assert claims(result) == (True, True)


def test_a_session_of_an_unchecked_bundle_is_not_sealed(fresh: Open, own: Path) -> None:
    engine = fresh()
    engine.restore_session(saved(fresh(check=False), own / "a.session"))
    assert claims(ask(engine)) == (None, None)


def test_all_of_several_claims() -> None:
    assert of_all([]) is True
    assert of_all([True, None]) is None
    assert of_all([True, None, False]) is False
