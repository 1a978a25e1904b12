"""Models that draw: logits, guided codes and pictures against the authors' code of LlamaGen."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgespec.engine.captions import CaptionReader
from edgespec.engine.loading import load
from edgespec.errors import BundleError, IncompatibleDraft, InvalidRequest
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.images.drawn import NearestCodes, png
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import LoadOptions
from tests.cli.conftest import Command
from tests.cli.conftest import command as command
from tests.support.llamagen import ARCHIVE, CAPTION, CLASSES, CODES, IDS, SCALE, SIDE, SIZE, write_llamagen


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamagen")
    source = write_llamagen(folder / "model")
    export_model(ExportOptions(str(source), folder / "bundle", ["self-spec"], format="fp32", trials=2), golden=False)
    return folder / "bundle"


@pytest.mark.parametrize("operators", ["native", "stock"])
def test_logits_codes_and_pictures_are_those_of_the_authors_code(bundle: Path, operators: str) -> None:
    with load(bundle, threads=1, operators=operators) as engine, np.load(ARCHIVE) as wanted:
        for label, rows in zip((3, CLASSES), wanted["logits"], strict=True):
            slot = open_slot(engine.model)
            found = slot.forward(np.array([SIZE + label, *CODES[:-1]], np.int64)).logits
            np.testing.assert_allclose(found[:, :SIZE], rows, atol=1e-4)
        drawing = engine.draw("3", method="ar")
        assert drawing.result.tokens == wanted["guided"].tolist()
        picture = engine.code_decoder.run(wanted["guided"].reshape(SIDE, SIDE))
        np.testing.assert_allclose(picture, wanted["picture"], atol=1e-4)
        opened = np.asarray(Image.open(io.BytesIO(drawing.png())))
        assert np.array_equal(opened, drawing.pixels)
        assert np.abs(opened / 127.5 - 1 - np.clip(wanted["picture"], -1, 1)).max() < 0.004
        for method in engine.methods:
            assert engine.draw("3", method=method, fallback=False).result.tokens == drawing.result.tokens, method
        lent = engine.draw("3", method="self-spec", fallback=False, accept="lantern:40,1.0").result
        assert lent.tokens != drawing.result.tokens
        assert not lent.lossless
        assert "LANTERN" in lent.approximations[-1]
        drawn = engine.draw("3", temperature=5.0, seed=1).result  # of logits nearly alike, zeros of classes among them
        assert max(drawn.tokens) < SIZE
        assert engine.draw("3", guidance_scale=1.0).result.tokens != drawing.result.tokens
        assert engine.defaults.guidance_scale == SCALE


def test_a_caption_is_drawn_as_by_the_authors_code(tmp_path: Path) -> None:
    source = write_llamagen(tmp_path / "model", captions=True)
    with pytest.raises(IncompatibleDraft, match="captions"):
        load_source(ExportOptions(str(source), tmp_path / "no", ["speculative"], draft=str(source)))
    export_model(
        ExportOptions(str(source), tmp_path / "bundle", ["self-spec", "ngram"], format="fp32", trials=2), golden=False
    )
    with load(tmp_path / "bundle", threads=1) as engine, np.load(ARCHIVE) as wanted:
        reader = engine.inputs.reader
        assert isinstance(reader, CaptionReader)
        asked, instead = reader.caption(CAPTION)
        assert len(asked) == len(IDS)
        asked.hold()
        for begin, rows in zip((list(asked), instead), wanted["captioned_logits"], strict=True):
            slot = open_slot(engine.model)
            slot.prefill(begin[:-1])
            found = slot.forward(np.array([begin[-1], *CODES[:-1]], np.int64)).logits
            np.testing.assert_allclose(found, rows, atol=1e-4)
        for method in engine.methods:
            assert engine.draw(CAPTION, method=method, fallback=False).result.tokens == wanted["captioned"].tolist()
        assert engine.draw("cat").result.tokens != wanted["captioned"].tolist()
        other = engine.draw(CAPTION, negative_prompt="cat").result.tokens
        assert other != wanted["captioned"].tolist()
        assert engine.draw(CAPTION, negative_prompt=CAPTION).result.tokens != other
        with pytest.raises(InvalidRequest, match="does not know"):
            engine.draw(" ")


def test_memory_is_planned_for_the_decoder_of_codes(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.codes is not None
    assert manifest.codes.working == 4 * 32 * (2 * SIDE) ** 2  # 32 channels, twice as many lines as codes
    use = LoadOptions().resolve(manifest)
    planned, without = memory_of(manifest, use), memory_of(manifest.model_copy(update={"codes": None}), use)
    assert planned.after - without.after >= (bundle / "codes.onnx").stat().st_size + 4 * manifest.codes.working


def test_what_cannot_be_drawn_is_refused(bundle: Path) -> None:
    with load(bundle, threads=1) as engine:
        for prompt in ("", "a house", "<none>"):
            with pytest.raises(InvalidRequest, match="does not know"):
                engine.draw(prompt)
        with pytest.raises(InvalidRequest, match="does not speak"):
            engine.speak("3")


def test_codes_that_look_alike_are_the_nearest_vectors(bundle: Path) -> None:
    with load(bundle, threads=1) as engine:
        codes = engine.bundle.manifest.codes
        assert codes is not None
        near = NearestCodes(bundle, codes, 5).near
        vectors = np.fromfile(bundle / "codebook.bin", "<f4").reshape(SIZE, -1)
        far = np.linalg.norm(vectors - vectors[7], axis=1)
        assert near(7).tolist() == np.argsort(far)[1:6].tolist()
        assert not len(near(SIZE))


def test_a_png_is_what_pillow_reads() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_a_letter_is_drawn_without_a_download(command: Command, tmp_path: Path) -> None:
    options = ExportOptions("builtin:glyphs", tmp_path / "glyphs", ["speculative"], "int8", threads=1, quick=True)
    export_model(replace(options, draft="builtin:glyphs-draft"), golden=False)
    run = ("run", tmp_path / "glyphs", "--prompt", "I sans bold", "--threads", 1, "--temperature", 0)
    told = command(*run, "-o", tmp_path / "a.png", "--json").json
    assert (told["lossless"], told["finish"]) == (True, "eos")
    drawn = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    dark = (drawn < 128).mean(0) > 0.4
    assert 3 <= dark.sum() <= 7  # a stem, as wide as a bold one is
    with load(tmp_path / "glyphs", threads=1) as engine:
        for method in engine.methods:
            made = engine.draw("I sans bold", method=method, fallback=False, temperature=0.0)
            assert np.array_equal(made.pixels[..., 0], drawn), method
    voice = ("-o", tmp_path / "a.png", "--voice", "tara"), "--voice is only for speech models"
    for words, why in ((), "-o picture.png"), (("-o", "a.wav"), "ends with .png"), voice:
        command(*run, *words).refused(2, why)


def test_the_codes_vectors_are_a_listed_file(bundle: Path, tmp_path: Path) -> None:
    """A file that is not listed has no digest, so no image could be verified."""
    shutil.copytree(bundle, tmp_path / "copy")
    data = json.loads((bundle / MANIFEST).read_text("utf-8"))
    codebook = data["codes"]["image"]["codebook"]
    data["files"].pop(codebook)
    (tmp_path / "copy" / MANIFEST).write_text(json.dumps(data), "utf-8")
    with pytest.raises(BundleError, match=f"uses '{codebook}' but does not list it"):
        load(tmp_path / "copy")
