"""Session files: another process restores the same text, without computing it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest, SessionError
from edgespec.runtimes.files.session_file import LINE
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, PROMPTS

Fresh = Callable[..., Engine]
BEGINNING = PROMPTS[14] * 3  # some hundred tokens: more than a block of keys


@pytest.mark.parametrize(
    "how",
    [
        {"method": "ar"},
        {"method": "speculative"},
        {"method": "medusa"},
        {"method": "speculative", "temperature": 0.8, "seed": 5, "acceptance": "coupled"},
    ],
)
def test_a_restored_text_goes_on_the_same_way(
    fresh: Fresh, tmp_path: Path, prefills: list[tuple[Slot, list[int]]], how: dict[str, Any]
) -> None:
    file = tmp_path / "a.session"
    first = fresh()
    prompt = first.codec.encode(BEGINNING)
    written = [*prompt, *first.generate(prompt, max_new_tokens=24, ignore_eos=True, **how).tokens]
    first.save_session(file, written)
    whole = [*written, *first.codec.encode("\nJULIET:", special=False)]
    expected = fresh().generate(whole, max_new_tokens=24, ignore_eos=True, **how)
    assert expected.stats.reused_tokens == 0

    second = fresh()
    second.rows_exact()  # this check runs its own prefill
    assert second.restore_session(file) == []
    prefills.clear()
    got = second.generate(whole, max_new_tokens=24, ignore_eos=True, **how)
    assert got.tokens == expected.tokens
    assert got.stats.reused_tokens == len(written)
    # neither the target nor the draft reads more than what is new and what was written last
    assert max((len(tokens) for _, tokens in prefills), default=0) < len(whole) - len(prompt)


def test_saving_computes_what_is_missing(fresh: Fresh, tmp_path: Path) -> None:
    """A beginning that many prompts share: once per device, without an answer."""
    first, second = fresh(), fresh()
    tokens = first.codec.encode(BEGINNING)
    first.save_session(tmp_path / "a.session", BEGINNING)
    second.restore_session(tmp_path / "a.session")
    for end in ("\nROMEO:", "\nJULIET:"):
        whole = [*tokens, *first.codec.encode(end, special=False)]
        got = second.generate(whole, max_new_tokens=8)
        assert got.stats.reused_tokens >= len(tokens)
        assert got.tokens == fresh().generate(whole, max_new_tokens=8).tokens


def test_a_slot_that_went_elsewhere_is_saved_as_asked(fresh: Fresh, tmp_path: Path) -> None:
    first, second = fresh(), fresh()
    first.generate(BEGINNING + "\nROMEO:", max_new_tokens=16, method="speculative")
    first.save_session(tmp_path / "a.session", BEGINNING + "\nHAMLET:")
    second.restore_session(tmp_path / "a.session")
    whole = BEGINNING + "\nHAMLET:"
    got = second.generate(whole, max_new_tokens=16, method="speculative")
    assert got.stats.reused_tokens == got.stats.prompt_tokens - 1
    assert got.tokens == fresh().generate(whole, max_new_tokens=16).tokens


@pytest.mark.parametrize("attention", ["int8", "f32"])
def test_other_keys(native: None, bundles: Callable[..., Path], tmp_path: Path, attention: str) -> None:
    folder, file = bundles("native"), tmp_path / "a.session"
    engines = [load(folder, threads=1, attention=attention) for _ in range(3)]
    engines[0].save_session(file, BEGINNING)
    engines[1].restore_session(file)
    results = [engine.generate(BEGINNING, max_new_tokens=24) for engine in engines[1:]]
    assert results[0].tokens == results[1].tokens
    assert results[0].stats.reused_tokens == results[0].stats.prompt_tokens - 1
    with pytest.raises(SessionError, match="saved with other attention"):
        load(folder, threads=1, attention="f16").restore_session(file)


def test_what_belongs_to_other_settings_is_refused(native: None, bundles: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    engine = load(bundles("native"), threads=1)
    engine.save_session(file, BEGINNING)
    with pytest.raises(SessionError, match="saved with other weights"):
        load(bundles("native", "fp32"), threads=1).restore_session(file)
    with pytest.raises(SessionError, match="saved with other"):
        load(bundles("native"), threads=1, operators="stock").restore_session(file)
    with pytest.raises(SessionError, match="expected at most 32, the context"):
        load(bundles("native"), threads=1, context=32).restore_session(file)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.save_session(file, [1, 1 << 20])
    with pytest.raises(SessionError, match="cannot be written"):
        engine.save_session(tmp_path / "none" / "a.session", [1])
    engine.restore_session(file)  # what was refused has not touched it


def signed(body: bytes, size: int, version: int = 2) -> bytes:
    """Return a session file of ``body`` whose header has the right digest, and this ``size`` and ``version``."""
    words = version.to_bytes(4, "little") + size.to_bytes(4, "little")
    return (b"EDGESESS" + words + hashlib.sha256(body).digest()).ljust(LINE, b"\0") + body


def test_a_session_file_of_version_1_is_read(fresh: Fresh, tmp_path: Path) -> None:
    """Its header has another name of a key."""
    engine, file = fresh(), tmp_path / "a.session"
    engine.save_session(file, BEGINNING, [{"role": "user", "content": "Wherefore?"}])
    made = file.read_bytes()
    size = int.from_bytes(made[12:16], "little")
    header = json.loads(made[LINE : LINE + size])
    header["target"]["furthest"] = header["target"].pop("high_water_mark")
    text = json.dumps(header).encode()
    file.write_bytes(signed(text + made[LINE + size :], len(text), version=1))
    assert fresh().restore_session(file) == header["messages"]
    file.write_bytes(signed(text + made[LINE + size :], len(text)))
    with pytest.raises(SessionError, match=r"target\.(high_water_mark|furthest)"):
        fresh().restore_session(file)
    for wrong in (b"[]", b'{"target": 3}'):
        file.write_bytes(signed(wrong, len(wrong), version=1))
        with pytest.raises(SessionError, match="Input should be"):
            fresh().restore_session(file)


def test_files_of_strangers(fresh: Fresh, tmp_path: Path) -> None:
    """Every one is refused by a sentence; none makes a traceback."""
    engine, file = fresh(), tmp_path / "a.session"
    engine.save_session(file, BEGINNING, [{"role": "user", "content": "Wherefore?"}])
    good = file.read_bytes()
    size = int.from_bytes(good[12:16], "little")
    header, body = json.loads(good[LINE : LINE + size]), good[LINE + size :]
    assert header["messages"] == engine.restore_session(file)

    def changed(less: int = 0, **changes: Any) -> bytes:
        text = json.dumps(header | {"target": header["target"] | changes}).encode()
        return signed(text + body[: len(body) - less], len(text))

    tokens = header["target"]["tokens"]
    cases = {
        b"": "no session file",
        b"no session at all" * 40: "no session file",
        good[:40]: "no session file",
        good[:-1]: "damaged",
        good[:-1] + bytes([good[-1] ^ 1]): "damaged",
        good + b"\0": "damaged",
        good[:8] + b"\3" + good[9:]: "version 3",
        good[:12] + b"\xff\xff\xff\x7f" + good[16:]: "damaged",
        signed(good[LINE:], 5): "not readable as JSON",
        signed(b"[" * 4096, 4096): "not readable as JSON",
        signed(b"{}", 2): "target: Field required",
        signed(good[LINE : LINE + size], size): "bytes of slots",
        changed(nbytes=-1): "target.nbytes",
        changed(tokens=[-1]): "target.tokens.0",
        changed(tokens="x"): "target.tokens",
        changed(high_water_mark=1 << 40): "target.high_water_mark",
        changed(high_water_mark=1 << 30): "expected at most",
        changed(tokens=tokens * 1000): "expected at most",
        changed(less=64, nbytes=len(body) - 64): f"tokens of {len(body) - 64} bytes",
        changed(tokens=[*tokens, 1 << 20]): "outside the vocabulary",
        changed(origin={}): "saved with other",
        changed(origin={"weights": "x" * 100000}): "saved with other",
        changed(more=1): "target.more",
    }
    for content, said in cases.items():
        file.write_bytes(content)
        with pytest.raises(SessionError, match=said) as found:
            engine.restore_session(file)
        assert len(str(found.value)) < 1000
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SessionError, match="expected a session file"):
            engine.restore_session(path)


@pytest.mark.parametrize("operators", OPERATORS[:1], indirect=True)
def test_only_its_owner_may_read_it(fresh: Fresh, tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    fresh().save_session(file, "ROMEO:")
    assert file.stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
