"""Prompts are read once: another process continues from the disk, and generates the same text."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine import prompt_cache
from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.cache import entries
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, PROMPTS, TARGET
from tests.engine.conftest import keep_prompts

Fresh = Callable[..., Engine]
BEGINNING = PROMPTS[14] * 20  # more than two blocks
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "ar"},
    {"method": "ngram"},
    {"method": "speculative"},
    {"method": "speculative", "temperature": 0.8, "seed": 5, "acceptance": "coupled"},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return keep_prompts(tmp_path, monkeypatch)


def files(folder: Path) -> list[Path]:
    """All files that hold something of a prompt."""
    return sorted(path for path in folder.glob("*/*") if path.suffix in (".keys", ".end"))


def told(engine: Engine, prompt: Any, **how: Any) -> Result:
    """Complete a prompt with a new engine, and close it."""
    with engine:
        return engine.generate(prompt, **{"method": "ar", "max_new_tokens": 24, "ignore_eos": True, **how})


def unkept(fresh: Fresh, prompt: Any, **how: Any) -> Result:
    """Complete it with an engine that neither finds nor keeps anything."""
    found = told(fresh(prompt_cache=False), prompt, **how)
    assert found.stats.reused_tokens == 0
    return found


@pytest.mark.parametrize("how", METHODS)
def test_a_prompt_is_read_once(fresh: Fresh, folder: Path, how: dict[str, Any]) -> None:
    expected = unkept(fresh, BEGINNING, **how)
    assert not folder.exists()
    first = told(fresh(), BEGINNING, **how)
    again = told(fresh(), BEGINNING, **how)
    assert first.tokens == again.tokens == expected.tokens
    assert first.stats.reused_tokens == 0
    assert again.stats.reused_tokens == again.stats.prompt_tokens - 1
    assert again.exact == expected.exact


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_the_draft_does_not_read_again(fresh: Fresh, prefills: list[tuple[Slot, list[int]]]) -> None:
    how: dict[str, Any] = {"method": "speculative", "fallback": False}
    told(fresh(), BEGINNING, **how)
    prefills.clear()
    assert told(fresh(), BEGINNING, **how).stats.drafted > 0
    assert max((len(tokens) for _, tokens in prefills), default=0) < 64


@pytest.mark.parametrize("attention", ["f16", "int8"])
@pytest.mark.parametrize("method", ["ar", "ngram"])
@pytest.mark.parametrize("name", ["lfm2_conv", "qwen3_5_delta"])
def test_states_are_found_again(
    native: None, chatty: Callable[[str], Path], name: str, method: str, attention: str
) -> None:
    """Hybrids: a conversation continues after a restart, and another one starts after the same system prompt."""

    def fresh(**how: Any) -> Engine:
        return load(chatty(name), threads=1, attention=attention, **how)

    system = {"role": "system", "content": "You are the keeper of a lighthouse by the sea. " * 12}
    asked: list[list[Any]] = [[system, {"role": "user", "content": "What did you see last night?"}]]
    how: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "method": method}
    with fresh() as engine:
        first = engine.chat(asked[0], **how)
        system_tokens = len(engine.codec.chat([system], generation_prompt=False))
    asked.append([*asked[0], {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}])
    asked.append([system, {"role": "user", "content": "Who are you, and who was here before you came?"}])
    least = first.stats.prompt_tokens - 16, first.stats.prompt_tokens - 16, system_tokens
    for messages, reused in zip(asked, least, strict=True):
        with fresh() as engine, fresh(prompt_cache=False) as other:
            got, expected = engine.chat(messages, **how), other.chat(messages, **how)
        assert got.tokens == expected.tokens
        assert expected.stats.reused_tokens == 0
        assert got.stats.reused_tokens >= reused


@pytest.mark.parametrize("left", [-1, 0])
def test_states_that_wait_stay_within_a_budget(
    native: None, chatty: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    with load(chatty("lfm2_conv"), threads=1, budget="16GiB") as engine:
        assert 0 < (engine.memory_budget.left() or 0) < 16 << 30
        monkeypatch.setattr(engine.prompts._writer, "_left", lambda: left)
        engine.generate("The harbour lights came on. " * 40, max_new_tokens=4)
    assert bool(files(folder)) == (left == 0)
    with load(chatty("lfm2_conv"), threads=1) as engine:
        assert engine.memory_budget.left() is None


@pytest.mark.parametrize("attention", ["f32", "int8", "int4"])
def test_keys_in_other_formats(native: None, coded: Path, folder: Path, attention: str) -> None:
    """Each format has separate files; coded keys continue from the exact keys of the newest tokens."""

    def fresh(**how: Any) -> Engine:
        return load(coded, threads=1, **{"attention": attention, **how})

    first = told(fresh(), BEGINNING)
    again = told(fresh(), BEGINNING)
    assert again.tokens == first.tokens
    assert again.stats.reused_tokens == again.stats.prompt_tokens - 1
    longer = told(fresh(), BEGINNING + again.text + "\nROMEO:")
    assert longer.tokens == unkept(fresh, BEGINNING + again.text + "\nROMEO:").tokens
    assert longer.stats.reused_tokens >= first.stats.prompt_tokens - 8
    assert told(fresh(attention="f16"), BEGINNING).stats.reused_tokens == 0


@pytest.fixture(scope="module")
def coded(native: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the embedded model with tables for keys in four bits."""
    output = tmp_path_factory.mktemp("coded") / "bundle"
    export_model(ExportOptions(TARGET, output, [], "int4", attention=["int4"], threads=1), golden=False)
    return output


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_two_conversations_of_one_beginning(fresh: Fresh) -> None:
    told(fresh(), BEGINNING + "\nROMEO:")
    got = told(fresh(), BEGINNING + "\nJULIET:")
    assert got.tokens == unkept(fresh, BEGINNING + "\nJULIET:").tokens
    assert got.stats.reused_tokens >= 512  # whole blocks


@pytest.mark.parametrize("operators", ["native"], indirect=True)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_changed_byte_is_found(fresh: Fresh, folder: Path, place: str) -> None:
    """The file is removed with one warning, and the prompt is read and stored again."""
    expected = told(fresh(), BEGINNING)
    good = {path: path.read_bytes() for path in files(folder)}
    assert len(good) >= 3
    for path, content in good.items():
        at = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[place]
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = told(fresh(), BEGINNING)
        assert got.tokens == expected.tokens
        assert (got.stats.reused_tokens < got.stats.prompt_tokens - 1) == bool(caught)
        assert [str(path) in str(one.message) for one in caught] in ([True], [])
        assert not caught or not path.exists() or path.read_bytes() != changed
        path.write_bytes(content)
    assert told(fresh(), BEGINNING).stats.reused_tokens == expected.stats.prompt_tokens - 1


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_files_of_strangers(fresh: Fresh, folder: Path) -> None:
    """Files of another text, of no length, or invalid ones are not used, and cause no traceback."""
    expected = told(fresh(), BEGINNING)
    first, second = (path for path in files(folder) if path.suffix == ".keys")
    for content in (b"", b"x" * 64, first.read_bytes()[:100], second.read_bytes()):
        first.write_bytes(content)
        with pytest.warns(UserWarning, match="read again"):
            assert told(fresh(), BEGINNING).tokens == expected.tokens
    first.unlink()
    first.mkdir()
    assert told(fresh(), BEGINNING).tokens == expected.tokens


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_off_is_off(fresh: Fresh, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(fresh(prompt_cache=False), BEGINNING)
    with fresh() as engine:
        engine.plain().generate(BEGINNING, max_new_tokens=2)
        engine.generate_batch([BEGINNING] * 3, max_new_tokens=2)
    told(fresh(check=False), BEGINNING)  # the owner of those keys is unknown
    monkeypatch.setenv("EDGESPEC_PROMPT_CACHE", "0")
    told(fresh(), BEGINNING)
    monkeypatch.delenv("EDGESPEC_PROMPT_CACHE")
    monkeypatch.setenv("EDGESPEC_KEY", str(tmp_path))  # no file: no key to seal with
    told(fresh(), BEGINNING)
    monkeypatch.undo()
    assert not folder.exists()


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_what_is_read_again_quickly_is_not_kept(fresh: Fresh, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "WORTH", 1e9)
    told(fresh(), BEGINNING)
    assert not folder.exists()


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_only_its_owner_may_read_it(fresh: Fresh, folder: Path) -> None:
    told(fresh(), BEGINNING)
    (inner,) = folder.iterdir()
    for path in (folder, inner, *inner.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (entry,) = (entry for entry in entries() if entry.kind == "prompts")
    assert entry.tokens > 0
    assert entry.source
    inner.chmod(0o755)
    for path in files(folder):
        path.unlink()
    told(fresh(), BEGINNING)
    assert files(folder) == []  # others may enter it


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_a_server_keeps_the_texts_of_keys_apart(fresh: Fresh) -> None:
    def reused(owner: str | None) -> int:
        with fresh() as engine:
            batch = RunningBatch(engine, 2)
            settings = engine.defaults.changed(max_new_tokens=2)
            stream = batch.join(engine.codec.encode(BEGINNING), settings, owner=owner)
            while batch.requests:
                for _ in batch.round():
                    pass
            batch.close()
            return stream.result.stats.reused_tokens

    assert reused("alice 127.0.0.1") == 0
    assert reused("bob 127.0.0.1") == 0
    assert reused(None) == 0
    assert reused("alice 10.0.0.7") > 512  # the key says whose it is
    assert reused("bob 127.0.0.1") > 512


CHILD = """
import sys
from edgespec.engine import prompt_cache
prompt_cache.WORTH, prompt_cache.EVERY = 0.0, 256
import edgespec
with edgespec.load(sys.argv[1], threads=1) as engine:
    prompt = engine.codec.encode(sys.argv[2])
    print("loaded", flush=True)
    for at in range(int(sys.argv[3])):
        result = engine.generate([*prompt[at:], *prompt[:at]], max_new_tokens=8)
    print(result.tokens, flush=True)
"""


def child(bundle: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(bundle), BEGINNING, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(bundle: Path, fresh: Fresh, folder: Path, times: int) -> None:
    """Kill a writing process repeatedly: its files are valid, and no partial file remains."""
    expected = unkept(fresh, BEGINNING, max_new_tokens=8)
    for at in range(times):
        with child(bundle, 40) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
            time.sleep(0.02 + 0.3 * (at * 0.618 % 1))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # all existing files are complete
            assert told(fresh(), BEGINNING, max_new_tokens=8).tokens == expected.tokens
    assert files(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_a_process_that_is_killed_leaves_nothing_wrong(bundle: Callable[..., Path], fresh: Fresh, folder: Path) -> None:
    killed(bundle("int4"), fresh, folder, 5)


@pytest.mark.nightly
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_fifty_that_are_killed(bundle: Callable[..., Path], fresh: Fresh, folder: Path) -> None:
    killed(bundle("int4"), fresh, folder, 50)


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_several_processes_at_once(bundle: Callable[..., Path], fresh: Fresh, folder: Path) -> None:
    """They write the same files and remove each other's: every text is the right one."""
    expected = unkept(fresh, BEGINNING, max_new_tokens=8)
    with child(bundle("int4"), 1) as first, child(bundle("int4"), 1) as second:
        found = [process.communicate(timeout=120)[0].splitlines()[-1] for process in (first, second)]
    assert found == [str(expected.tokens)] * 2
    assert told(fresh(), BEGINNING, max_new_tokens=8).stats.reused_tokens == expected.stats.prompt_tokens - 1


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_beyond_the_limit_the_oldest_texts_go(fresh: Fresh, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(fresh(), BEGINNING)
    size = sum(path.stat().st_size for path in files(folder))
    monkeypatch.setenv("EDGESPEC_PROMPT_CACHE", str(round(2.5 * size)))
    others = [PROMPTS[19] * 100, PROMPTS[5] * 600, PROMPTS[9] * 40]
    for prompt in (*others[:1], BEGINNING, *others[1:]):
        told(fresh(), prompt)
        assert sum(path.stat().st_size for path in files(folder)) <= 2.5 * size
    assert told(fresh(), others[-1]).stats.reused_tokens > 0
    assert told(fresh(), others[0]).stats.reused_tokens == 0


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_what_was_read_of_a_prompt_is_kept_although_it_ended(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "EVERY", 256)
    with fresh() as engine:
        stream = engine.stream(BEGINNING, max_new_tokens=4)
        while len(stream.request.target.tokens) < 512:
            stream.request.step()
        stream.close()
    assert told(fresh(), BEGINNING, max_new_tokens=4).stats.reused_tokens == 512


def test_rows_that_are_still_to_be_moved(native: None, bundles: Callable[..., Path]) -> None:
    """Pending moves of the last request's tree are done before the rest of a text comes from the disk."""

    def fresh(**how: Any) -> Engine:
        return load(bundles("native"), threads=1, **how)

    tree: dict[str, Any] = {
        "method": "speculative",
        "branch": (2, 2, 2),
        "gamma": 3,
        "adaptive": False,
        "ignore_eos": True,
    }
    pending = 0
    with fresh(prompt_cache=False) as plain, fresh() as writer, fresh() as engine:
        prompt = plain.codec.encode(BEGINNING)
        for length in range(496, 514):  # so that they are on both sides of a block's end
            first = engine.generate(prompt[:length], max_new_tokens=12, **tree)
            slots = [session.target for session in engine.sessions.sessions]
            pending += any(slot._moving for slot in slots if isinstance(slot, NativeSlot))
            whole = [*prompt[:length], *first.tokens, *prompt[length:]]
            writer.generate(whole, max_new_tokens=2, ignore_eos=True, method="ar")
            writer.prompts.finish()
            got = engine.stream(whole, max_new_tokens=2, ignore_eos=True, method="ar")
            other = plain.stream(whole, max_new_tokens=2, ignore_eos=True, method="ar")
            assert [chunk.text for chunk in got] == [chunk.text for chunk in other]
            assert got.result.stats.reused_tokens > length + 64
            found, expected = got.request.target.snapshot(), other.request.target.snapshot()
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert pending  # else this shows nothing
