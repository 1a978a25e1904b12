"""A CTranslate2 folder translates or transcribes with one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.conftest import THREADS
from tests.support.ct2 import whole
from tests.support.whisper import DIGITS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


ROUNDED = {"The train to the coast leaves in the morning.": "er Zug zur Küste fährt am Morgen ab."}
"""Output of ctranslate2 4.8.5 with these int8 weights; the float model's output begins with "Der"."""


@pytest.mark.parametrize("config", [True, False])
def test_an_opus_mt_translates_as_ctranslate2_does(command: Command, tmp_path: Path, config: bool) -> None:
    folder, wanted = whole(tmp_path, "opus")
    if not config:  # as older converters leave it
        (folder / "config.json").unlink()
    assert len(wanted) > 5
    assert ROUNDED.keys() <= wanted.keys()
    wanted |= ROUNDED
    for text, translated in wanted.items():
        found = command("run", folder, "--prompt", text, "--threads", THREADS)
        assert (found.code, found.out) == (0, f"{translated}\n"), found.err
    (made,) = command("list", "--json").json["bundles"]
    assert made["model"] == str(folder.resolve())


def test_a_faster_whisper_hears_what_is_said(command: Command, tmp_path: Path) -> None:
    folder, said = whole(tmp_path, "hears")
    assert len(said) == 4
    for language, text in said.items():
        found = command("run", folder, "--audio", DIGITS / f"{language}.wav", "--threads", THREADS, "--json").json
        assert (found["text"].strip(), found["language"]) == (text, language)


def test_what_a_folder_lacks_is_named(command: Command, tmp_path: Path) -> None:
    folder, _ = whole(tmp_path, "opus")
    (folder / "source.spm").unlink()
    command("run", folder, "--prompt", "Hello.").refused(1, "source.spm", "converted from")
    (folder / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    command("run", folder, "--prompt", "Hello.").refused(1)
    assert command("list", "--json").json == {"bundles": []}
