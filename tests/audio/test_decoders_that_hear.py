"""Decoders with audio input: texts match transformers, methods match plain decoding, transcripts have windows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Audio, Image
from edgespec.cli.chat import Chat
from edgespec.decoding.text import INSERTED
from edgespec.engine import audio_windows
from edgespec.engine import images as module
from edgespec.engine.hearing import windows as prompts_of
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.export.architectures import qwen3_asr, voxtral
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.audio.reading import RATE, pieces
from edgespec.runtimes.audio.spoken import pcm, wav_header
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.options import RunOptions
from tests.support import hearing, sight

pytestmark = pytest.mark.usefixtures("native")
Parts = list[Any]


def said(*parts: Any) -> Parts:
    return list(parts)


def export(folder: Path, name: str, form: Format, methods: Sequence[str] = (), **how: Any) -> Path:
    source = hearing.write_case(folder / "source", name)
    (source / "calibration.txt").write_text("what is the sound of the sea and what is this " * 99, "utf-8")
    draft = str(source) if "speculative" in methods else None
    options = ExportOptions(str(source), folder / "bundle", methods, form, draft=draft, threads=1, quick=True, **how)
    export_model(options, golden=False)
    return folder / "bundle"


@pytest.mark.parametrize("name", hearing.CASES)
def test_texts_behind_recordings_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder, wanted = export(tmp_path, name, "fp32"), hearing.reference(name)
    first, second, _ = map(Audio, hearing.recordings())
    parts: Parts = [hearing.BEFORE, first, hearing.AFTER]
    with load(folder, threads=1) as engine:
        tokens = engine.encode(parts)
        assert [hearing.SOUND if token >= INSERTED else token for token in tokens] == wanted["ids"].tolist()
        slot = engine.open_slot()
        with tokens:
            slot.prefill(tokens[:-1])
            logits = slot.forward(np.array(tokens[-1:], np.int64)).logits[0]
        np.testing.assert_allclose(logits, wanted["logits"][-1], atol=1e-4, rtol=0)
        slot.close()
        how: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
        assert engine.generate(parts, method="ar", **how).tokens == wanted["greedy"].tolist()
        both = engine.generate_batch([tokens, said(second, " is"), parts], method="ngram", **how)
        assert [both[0].tokens, both[2].tokens] == [wanted["greedy"].tolist()] * 2


@pytest.mark.parametrize(
    "name, form", [("qwen3_asr", "int8"), ("qwen3_asr", "int4"), ("voxtral", "int8"), ("gemma4", "int8")]
)
def test_every_method_writes_what_plain_decoding_writes(tmp_path: Path, name: str, form: Format) -> None:
    folder = export(tmp_path, name, form, ("self-spec", "swift", "speculative"), trials=2)
    first, second, third = map(Audio, hearing.recordings())
    asked: list[Parts] = [["a ", first, " what is"], [second, " and ", third, " is it"]]
    with load(folder, threads=1) as engine:
        draft = engine.bundle.manifest.draft
        assert draft is not None
        assert draft.hearing is not None
        how: dict[str, Any] = {"max_new_tokens": 32, "ignore_eos": True, "fallback": False}
        expected = [engine.generate(one, method="ar", **how).tokens for one in asked]
        for method in ("ngram", "self-spec", "swift", "speculative"):
            made = [engine.generate(one, method=method, **how) for one in asked]
            assert [one.tokens for one in made] == expected, method
            assert [one.stats.dropped_reason for one in made] == [None, None]
            assert [one.tokens for one in engine.generate_batch(asked, method=method, batch=2, **how)] == expected


def test_pictures_and_recordings_share_a_prompt(tmp_path: Path) -> None:
    folder = export(tmp_path, "gemma4", "int8", ("speculative",))
    (first, second, _), (picture, other, *_) = map(Audio, hearing.recordings()), map(Image.of, sight.pictures())
    asked: list[Parts] = [["a ", picture, " and ", second, " is ", other, first, " it"], [first, " is ", picture, "?"]]
    how: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "fallback": False}
    parts = [{"type": "audio", "audio": second}, {"type": "image", "image": picture}, {"type": "text", "text": "what"}]
    with load(folder, threads=1) as engine:
        target = engine.bundle.manifest.target
        assert [sense.kind for sense in target.senses] == ["image", "audio"]
        words = {sense.kind: sense.part.prompt_template.id for sense in target.senses}
        counts = [sum(len(span.rows) for span in engine.encode(one).spans) for one in asked]
        assert [sum(token >= INSERTED for token in engine.encode(one)) for one in asked] == counts
        expected = [engine.generate(one, method="ar", **how).tokens for one in asked]
        for method in ("ngram", "speculative"):
            assert [engine.generate(one, method=method, **how).tokens for one in asked] == expected, method
        assert [one.tokens for one in engine.generate_batch(asked, batch=2, **how)] == expected
        chat = engine.conversation()
        chat.ask(parts, max_new_tokens=3)
        chat.save(tmp_path / "a.session")
        wanted = chat.ask("is it", max_new_tokens=3)
        for broken in ("<|audio|>", "<|image|>"):
            with pytest.raises(InvalidRequest, match="for 1 parts"):
                engine.generate([broken, first, " ", picture, " b"])
        assert words == {"image": 96, "audio": hearing.SOUND}
    with load(folder, threads=1, prompt_cache=False) as engine:
        again = engine.conversation(engine.restore_session(tmp_path / "a.session")).ask("is it", max_new_tokens=3)
        assert again.tokens == wanted.tokens
        assert again.stats.reused_tokens > 9
        memory = memory_of(engine.bundle.manifest, RunOptions(operators="native"))
    assert memory.part("audio tower").file > 0 < memory.part("tower").file
    assert memory.part("recordings").private == 4 * 64 * 750
    # buffers of clamped matrices, samples and features of 30 s
    assert memory.part("audio tower scratch").private > 750 * 4 * (192 + 3 * 2 * 40) + 4 * 5 * 480_000


def test_a_draft_with_towers_of_its_own_hears_what_a_draft_of_text_does_not(tmp_path: Path) -> None:
    first, *_ = map(Audio, hearing.recordings())
    folder = export(tmp_path, "voxtral", "int8", ("speculative",), draft_format="int8")
    manifest = (folder / "edgespec.json").read_text("utf-8")
    how: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "method": "speculative", "fallback": False}
    with load(folder, threads=1) as engine:
        own = engine.generate(said("a ", first, " what is"), **how)
    described = json.loads(manifest)
    for key in ("sound", "tower", "projectors"):
        del described["draft"][key]
    (folder / "edgespec.json").write_text(json.dumps(described), "utf-8")
    with load(folder, threads=1, check=False) as engine:
        blind = engine.generate(said("a ", first, " what is"), **how)
    assert blind.tokens == own.tokens
    assert own.stats.accepted / own.stats.drafted > 0.9 > blind.stats.accepted / max(1, blind.stats.drafted)


def test_a_transcript_is_a_window_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_windows, "MOST", 9)
    folder, whole = export(tmp_path, "qwen3_asr", "int8"), np.concatenate([*hearing.recordings()] * 4)
    first, *_ = hearing.recordings()
    parts = list(audio_windows.cut(pieces(whole)))
    assert np.array_equal(np.concatenate(parts), whole)
    assert [25 < len(part) / RATE <= 30 for part in parts] == [True, False]
    with load(folder, threads=1) as engine:
        seen: list[str] = []
        running = engine.transcription(whole, language="German", initial_prompt="names", on_text=seen.append)
        heard, found = list(running), running.transcript
        ask = ["<|im_start|>system\nnames<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"]
        for segment, part, start in zip(heard, parts, (0, len(parts[0])), strict=True):
            prompt = said(ask[0], Audio(part), f"{ask[1]}language German<asr_text>")
            made = engine.generate(prompt, max_new_tokens=9)
            assert segment.text.strip() == made.text.strip() in [one.strip() for one in seen]
            assert (segment.start, segment.end) == (start / RATE, (start + len(part)) / RATE)
        assert (found.language, found.duration, found.how["texts"]) == ("de", len(whole) / RATE, 2)
        sound = engine.bundle.manifest.target.sound
        assert sound is not None
        rows = [sum(token >= INSERTED for token in one) for one in prompts_of(engine, whole)]
        assert rows == [sound.front.rows(len(part) // 160) for part in parts]
        chat = Chat(engine, engine.conversation(), engine.defaults.changed(max_new_tokens=3), set())
        (tmp_path / "a.wav").write_bytes(wav_header(RATE, len(first)) + pcm(first))
        for typed in (f"/audio {tmp_path / 'a.wav'}", "what", f"/save {tmp_path / 'a.session'}"):
            chat.take(typed)
        wanted = chat.ask("is it")
    with load(folder, threads=1, prompt_cache=False) as engine:
        again = engine.conversation(engine.restore_session(tmp_path / "a.session")).ask("is it", max_new_tokens=3)
        assert again.tokens == wanted.tokens
        assert again.stats.reused_tokens > again.stats.image_rows > 9


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("language English<asr_text>Hello. ", ("en", "Hello.")),
        ("language None<asr_text>", (None, "")),
        ("language Engl", (None, "")),
        ("Hello.", (None, "Hello.")),
    ],
)
def test_a_language_that_was_heard_is_named(text: str, wanted: tuple[str | None, str]) -> None:
    assert audio_windows.parted(qwen3_asr.ASK, text) == wanted
    assert audio_windows.parted(voxtral.ASK, text) == (None, text.strip())


def test_what_is_heard_once_costs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESPEC_PROMPT_CACHE")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WORTH", 0.0)
    folder = export(tmp_path, "voxtral_three", "int8")
    first, *_ = hearing.recordings()
    how: dict[str, Any] = {"max_new_tokens": 9, "method": "ar"}
    with load(folder, threads=1) as engine:
        engine.transcribe(first[:9000])
        assert not list(tmp_path.rglob("*.rows"))
        made = engine.generate(said("a ", Audio(first), " is"), **how)
        assert len(list(tmp_path.rglob("*.rows"))) == 1
    monkeypatch.setattr(module.AudioMaker, "make", None)  # nothing may be computed again
    with load(folder, threads=1) as engine:
        assert engine.generate(said("a ", Audio(first.copy()), " is"), **how).tokens == made.tokens
        other = first.copy()
        other[7] += 1 / 32768
        with pytest.raises(TypeError):
            engine.generate(said("a ", Audio(other), " is"), **how)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    folder = export(tmp_path, "voxtral_three", "int8")
    first, *_ = hearing.recordings()
    silence = Audio(np.zeros(40 * 180 * 160 + 1, np.float32))
    with load(folder, threads=1) as engine:
        cases: list[tuple[Parts, str]] = [
            (["a ", silence, " b"], "72 s is 1230 rows, and this model hears 1200"),
            (["a", Audio(first)], "ends with a recording"),
            (["[AUDIO] ", Audio(first), " b"], "2 times for 1"),
            (["a ", Image.of(np.zeros((4, 4, 3), np.uint8)), " b"], "got an image"),
        ]
        for prompt, words in cases:
            with pytest.raises(InvalidRequest, match=re.escape(words)):
                engine.generate(prompt)
        for asked, words in (
            ({"task": "translate"}, "does not translate"),
            ({"initial_prompt": "names"}, "takes no prompt"),
            ({"rate": 1}, "1 samples a second"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                engine.transcribe(first, **asked)
        for broken, words in ((b"RIFF", "expected a sound file"), (np.full(999, np.nan, np.float32), "NaN")):
            with pytest.raises(InvalidRequest, match=words):
                engine.transcribe(broken)
        with pytest.raises(InvalidRequest, match="saved as a conversation"):
            engine.save_session("none", said("a ", Audio(first), " b"))
        manifest = engine.bundle.manifest
    memory = memory_of(manifest, RunOptions(operators="native"))
    assert memory.part("tower").file > 0
    assert memory.part("recordings").private == 4 * 64 * 510
