"""Images in prompts: every method's text is plain decoding's, and an image's embeddings are reused.

The model reads text, and its images encode words: the rows of an image are embeddings of the tokens that its pixels
name, so that the text after them continues from these words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.decoding.text import INSERTED
from edgespec.engine import images as module
from edgespec.engine.engine import Engine
from edgespec.engine.images import MAKERS, ImageMaker
from edgespec.engine.input import MultimodalTokens
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.export.bundle.writer import staged_folder
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model, write_bundle
from edgespec.planning.footprint import memory_of
from edgespec.reports.proof import PICTURE, check_golden, golden_of, prove
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.images.image import Image, proof_picture
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.slots.inserted import EmbeddingSpan
from tests.support import sight

pytestmark = pytest.mark.usefixtures("native")
TOKEN, SIDE = 191, 6  # a byte that no text has; pixels of a side
PART = ImagePart.model_validate(
    {
        "processor": {"kind": "gemma3", "patch": 1, "size": SIDE},
        "prompt_template": {"placeholder": "\x01", "token": "\x01", "id": TOKEN, "begin": "\n", "end": "\n"},
        "merge": {"how": "blocks", "factor": 1},
        "max_rows": SIDE * SIDE,
    }
)
METHODS = ["speculative", "self-spec", "swift", "ngram", "medusa", "paradecode", "eagle", "auto"]
LINES = "ROMEO: But soft, what light through yonder window breaks? It is the east, and Juliet is the sun.\nJULIET: "


class Words(ImageMaker):
    """Makes rows of the words that pixels name."""

    made = 0
    engine: Engine

    def make(self, image: Image, digest: bytes) -> EmbeddingSpan:
        Words.made += 1
        pixels = image.pixels.astype(np.int64).reshape(-1, 3)
        slot = self.engine.open_slot()
        rows = slot.embed(pixels[:, 0] + 256 * pixels[:, 1])
        slot.close()
        return EmbeddingSpan(digest, rows, (len(rows),))


def image(engine: Engine, text: str, more: int = 0) -> Image:
    """Make a picture of a text, in the last pixel of which ``more`` is added to what the model does not look at."""
    tokens = np.resize(np.array(engine.codec.encode(text, special=False)), SIDE * SIDE)
    pixels = np.stack([tokens % 256, tokens // 256, np.zeros_like(tokens)], -1).astype(np.uint8)
    pixels[-1, 2] = more
    return Image.of(pixels.reshape(SIDE, SIDE, 3))


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []
    output = tmp_path_factory.mktemp("images") / "bundle"
    options = ExportOptions("builtin:shakespeare", output, [one for one in METHODS if one not in ("ngram", "auto")],
                            "int8", draft="builtin:shakespeare-draft", drafter="builtin:shakespeare-eagle", threads=1,
                            trials=2, quick=True)  # fmt: skip
    source = load_source(options)
    assert source.arch is not None
    source.arch.inserts = source.arch.facts.hidden
    with staged_folder(output, False) as folder:
        write_bundle(folder, source)

    def get(**how: Any) -> Engine:
        bundle = Bundle.open(output)
        target = bundle.manifest.target.model_copy(update={"image": PART})
        bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MAKERS, "image", Words)
            engine = Engine(bundle, LoadOptions(threads=1, **how))
        engine.inputs.reader.makers["image"].engine = engine  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield get
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(open_engine: Callable[..., Engine]) -> Engine:
    return open_engine(prompt_cache=False)


Parts = list[str | Image]


def prompts(engine: Engine) -> list[Parts]:
    first, second = image(engine, LINES), image(engine, "Friends, Romans, countrymen, lend me your ears; ")
    return [[first, "JULIET: O Romeo, Romeo"], ["MARK ANTONY:", second, first, "I come to bury Caesar, "],
            ["To be, or not to be, that is the question. ", second, "To be, or not"]]  # fmt: skip


def tokens_of(engine: Engine, parts: Parts) -> MultimodalTokens:
    found = engine.encode(parts)
    assert isinstance(found, MultimodalTokens)
    return found


def test_every_methods_text_is_plain_decodings(engine: Engine) -> None:
    asked, drafted = prompts(engine), set[str]()
    expected = [engine.generate(one, method="ar", max_new_tokens=48) for one in asked]
    assert [one.stats.image_rows for one in expected] == [36, 72, 36]
    blind = engine.generate(str(asked[0][1]), method="ar", max_new_tokens=48)
    assert blind.tokens != expected[0].tokens
    for method in METHODS:
        for one, plainly in zip(asked, expected, strict=True):
            made = engine.generate(one, method=method, fallback=False, max_new_tokens=48)
            assert (made.tokens, made.text) == (plainly.tokens, plainly.text), method
            assert made.lossless
            assert made.exact
            assert made.stats.dropped_reason is None
            drafted |= {method} if made.stats.accepted else set()
        together = engine.generate_batch(asked, method=method, max_new_tokens=48, batch=3)
        assert [one.tokens for one in together] == [one.tokens for one in expected], method
    assert drafted == set(METHODS)
    drawn = SamplingParams(temperature=0.8, seed=5, acceptance="coupled")
    assert all(proof.exact for proof in prove(engine, asked, Settings(max_new_tokens=20, sampling=drawn), METHODS))
    punished = [engine.generate(asked[1], method=method, repetition_penalty=1.3, max_new_tokens=20).tokens
                for method in ("ar", "speculative")]  # fmt: skip
    assert punished[0] == punished[1]


def test_one_image_shares_all_and_one_that_differs_in_a_pixel_nothing(engine: Engine) -> None:
    text = "JULIET: O Romeo, Romeo, wherefore art thou Romeo?"
    one, same, other = (image(engine, LINES, more) for more in (1, 1, 2))
    Words.made = 0
    texts: list[Parts] = [[each, text] for each in (one, same, other)]
    first = engine.generate(texts[0], max_new_tokens=4, method="ar")
    second = engine.generate(texts[1], max_new_tokens=4, method="ar")
    rows = len(tokens_of(engine, texts[0]))
    assert (Words.made, first.stats.reused_tokens < 3, second.stats.reused_tokens) == (1, True, rows - 1)
    third = engine.generate(texts[2], max_new_tokens=4, method="ar")
    assert (Words.made, third.stats.reused_tokens) == (2, 2)  # the part before it
    assert first.tokens == second.tokens == third.tokens


def test_rows_and_prompts_are_found_after_a_restart(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGESPEC_PROMPT_CACHE")
    monkeypatch.setattr(module, "WORTH", 0.0)
    monkeypatch.setattr("edgespec.engine.prompt_cache.WORTH", 0.0)
    Words.made, found = 0, []
    for more in (3, 3, 4):
        engine = open_engine()
        asked: Parts = [image(engine, LINES, more), LINES]
        found.append(engine.generate(asked, max_new_tokens=16, method="speculative", fallback=False))
        engine.close()
    assert Words.made == 2
    assert found[0].tokens == found[1].tokens == found[2].tokens
    assert [one.stats.reused_tokens > 36 for one in found] == [False, True, False]


def test_what_is_refused(engine: Engine) -> None:
    one = image(engine, LINES)
    with pytest.raises(InvalidRequest, match="ends with an image"):
        engine.place([5, *[TOKEN] * SIDE**2], [one])
    with pytest.raises(InvalidRequest, match="1 places for the 36 rows"):
        engine.place([TOKEN, 5], [one])
    twice: Parts = [one, "a\x01b"]
    with pytest.raises(InvalidRequest, match="leave it out"):
        engine.generate(twice, max_new_tokens=1)
    placed = tokens_of(engine, [image(engine, LINES, 77), "and"])
    lost = [token + (1 << 14 if token >= INSERTED else 0) for token in placed]
    with pytest.raises(InvalidRequest, match="not there"):
        engine.generate(lost, max_new_tokens=1)
    with pytest.raises(InvalidRequest, match="saved as a conversation"):
        engine.save_session("none", placed)
    with pytest.raises(InvalidRequest, match="expected uint8"):
        Image.of(np.zeros((2, 2, 3), np.float32))


def test_only_models_that_read_images_are_given_some(engines: Callable[..., Engine]) -> None:
    parts: Parts = [Image.of(np.zeros((4, 4), np.uint8)), "what?"]
    with pytest.raises(InvalidRequest, match="reads only text"):
        engines("native").generate(parts)


def test_pictures_from_files_and_arrays(tmp_path: Path) -> None:
    """A picture on disk is opened as one given as an array."""
    from PIL import Image as Pillow

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Pillow.fromarray(pixels).save(tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").digest == Image.of(pixels).digest


TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def export(folder: Path, name: str, form: Format, methods: Sequence[str] = (), **how: Any) -> None:
    source = sight.write_case(folder / "source", name)
    (source / "calibration.txt").write_text("a picture of the sea and what it is " * 99, "utf-8")
    draft = str(source) if "speculative" in methods else None
    options = ExportOptions(str(source), folder / "bundle", methods, form, draft=draft, threads=1, quick=True, **how)
    export_model(options, golden=False)


@pytest.mark.parametrize(
    "name, form", [("gemma3", "int8"), ("gemma4_mixed", "int8"), ("qwen3_vl", "int4"), ("qwen3_5", "int8")]
)
def test_methods_where_rows_turn_see_each_other_or_leave_states(tmp_path: Path, name: str, form: Format) -> None:
    export(tmp_path, name, form, ("self-spec", "swift", "speculative"), trials=2)
    first, second, third, _ = map(Image.of, sight.pictures())
    asked: list[Parts] = [["a ", first, " what is"], [second, " and ", third, " is it"]]
    with load(tmp_path / "bundle", threads=1) as engine:
        how: dict[str, Any] = {"max_new_tokens": 32, "ignore_eos": True, "fallback": False}
        expected, accepted = [engine.generate(one, method="ar", **how).tokens for one in asked], 0
        for method in ("self-spec", "swift", "speculative"):
            made = [engine.generate(one, method=method, **how) for one in asked]
            assert [one.tokens for one in made] == expected, method
            assert [one.stats.dropped_reason for one in made] == [None, None]
            accepted += sum(one.stats.accepted for one in made)
            assert [one.tokens for one in engine.generate_batch(asked, method=method, batch=2, **how)] == expected
        assert accepted > 20


@pytest.mark.parametrize("name", sight.CASES)
def test_texts_behind_images_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    export(tmp_path, name, "fp32")
    wanted, shown = sight.reference(name), sight.pictures()
    manifest = Bundle.open(tmp_path / "bundle").manifest
    image_part = manifest.target.image
    assert image_part is not None
    memory = memory_of(manifest, RunOptions(operators="native"))
    assert memory.part("tower").file > 0
    assert memory.part("images").private >= 4 * image_part.max_rows * manifest.target.facts.hidden
    words = image_part.prompt_template
    template = TEMPLATE.replace("PLACE", words.written or words.placeholder)
    (tmp_path / "bundle" / "chat_template.jinja").write_text(template, "utf-8")
    first, second = (Image.of(shown[number]) for number in sight.SHOWN)
    parts: Parts = ["a picture ", first, " and another ", second, " what is it"]
    with load(tmp_path / "bundle", threads=1) as engine:
        tokens = tokens_of(engine, parts)
        assert [sight.IMAGE if token >= INSERTED else token for token in tokens] == wanted["ids"].tolist()
        slot = engine.open_slot()
        slot.prefill(tokens[:-1])
        logits = slot.forward(np.array(tokens[-1:], np.int64)).logits[0]
        np.testing.assert_allclose(logits, wanted["logits"][-1], atol=1e-4, rtol=0)
        slot.close()
        how: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
        assert engine.generate(parts, method="ar", **how).tokens == wanted["greedy"].tolist()
        both = engine.generate_batch([tokens, parts[2:], parts], method="ngram", **how)
        assert [both[0].tokens, both[2].tokens] == [wanted["greedy"].tolist()] * 2
        chat = engine.conversation()
        chat.ask([{"type": "image", "image": first}, {"type": "text", "text": "what"}], max_new_tokens=3)
        asked = chat.ask("is it", max_new_tokens=3).stats
        assert asked.image_rows == wanted["text.0"].tolist().count(sight.IMAGE)
        assert asked.reused_tokens >= asked.image_rows
        chat.save(tmp_path / "a.session")
        wanted_next = chat.ask("and now", max_new_tokens=3).tokens
        if name == "lfm2_vl":  # whose processor makes more of thin pictures than its towers were trained for
            thin: Parts = ["a ", Image.of(np.zeros((300, 2), np.uint8)), " b"]
            with pytest.raises(InvalidRequest, match="192 patches, and this model reads 64 at once"):
                engine.generate(thin, **how)
    with load(tmp_path / "bundle", threads=1, prompt_cache=False) as engine:
        again = engine.conversation(engine.restore_session(tmp_path / "a.session")).ask("and now", max_new_tokens=3)
        assert again.tokens == wanted_next
        assert again.stats.reused_tokens >= again.stats.image_rows == asked.image_rows


def test_a_request_that_cannot_begin_leaves_nothing(engine: Engine) -> None:
    given = tokens_of(engine, prompts(engine)[0])
    assert engine.encode(given) is given
    assert given.span_rows == sum(len(span.rows) for span in given.spans) == SIDE**2
    vocab = engine.bundle.manifest.target.facts.vocab
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.stream(given, logit_bias={vocab: 1.0})
    assert ([span.users for span in given.spans], engine.reservations.taken, engine.sessions.busy) == ([0], [], 0)
    stream = engine.stream(given, max_new_tokens=4)
    assert ([span.users for span in given.spans], len(engine.reservations.taken), engine.sessions.busy) == ([1], 1, 1)
    stream.close()
    stream.close()
    assert ([span.users for span in given.spans], engine.reservations.taken, engine.sessions.busy) == ([0], [], 0)


def test_golden_vectors_of_a_picture_and_fewer_rows(tmp_path: Path) -> None:
    source = sight.write_case(tmp_path / "source", "lfm2_vl")
    (source / "calibration.txt").write_text("a picture of the sea and what it is " * 99, "utf-8")
    bundle = edgespec.export(source, tmp_path / "bundle", format="int8", threads=1, quick=True, methods=["self-spec"])
    with load(bundle, threads=1) as engine:
        found = golden_of(engine)
        prompts = [prompt for prompt, _ in found if isinstance(prompt, MultimodalTokens)]
        assert len(prompts) == 1
        assert check_golden(engine) == (len(found), len(found))
        part, manifest = engine.bundle.manifest.target.image, engine.bundle.manifest
        assert part is not None
        assert all(proof.exact for proof in prove(engine, prompts, Settings(max_new_tokens=8), ["self-spec"]))
        wrong = part.proof[0].model_copy(update={"tokens": [token + 1 for token in part.proof[0].tokens]})
        target = manifest.target.model_copy(update={"image": part.model_copy(update={"proof": [wrong]})})
        engine.bundle = replace(engine.bundle, manifest=manifest.model_copy(update={"target": target}))
        assert check_golden(engine) == (len(found) - 1, len(found))
    with load(bundle, threads=1, image_rows=6) as engine:
        assert 0 < sum(token >= INSERTED for token in tokens_of(engine, ["a ", proof_picture(PICTURE), " b"])) <= 6
    with pytest.raises(InvalidRequest, match="at least 1 rows"):
        load(bundle, image_rows=0)
