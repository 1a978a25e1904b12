"""Models that read images equal transformers: the placeholders of a picture, and its embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import ExportError, InvalidRequest
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.descriptions import traits
from edgespec.export.architectures.sights import limit_images
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.measuring.vision_parity import tower_note
from edgespec.export.quantization.reference import reference_rows
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.images.processing import Encode, Processed, piece_rows, process, read_places
from edgespec.runtimes.slots.encoder import Encoder
from edgespec.runtimes.slots.shared import Model
from tests.support import sight

Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Architecture]:
    def opener(name: str) -> Architecture:
        return open_model(sight.write_case(tmp_path_factory.mktemp(name), name), None)

    return opener


def rows_of(image: ImagePart, found: Processed, learnt: Array | None, encode: Encode) -> Array:
    """Compute the decoder's rows of a picture, [R, width * (1 + deepstack)]."""
    return np.concatenate([piece_rows(piece, image, learnt, encode) for piece in found.pieces])


def in_numpy(seen: VisionEncoderSpec) -> Encode:
    sides = [seen.tower, *seen.projectors]
    return lambda at, rows, places: reference_rows(sides[at], rows, places if sides[at].rotaries else None)[0]


def natively(folder: Path, part: ModelPart) -> Encode:
    windows = part.image.windows if part.image else None
    sides = [Encoder(Model(folder, side, "native", 1), None if at else windows) for at, side in enumerate(part.sides)]
    return lambda side, rows, places: sides[side].encode(rows, places)


@pytest.mark.parametrize("name", sight.CASES)
def test_rows_and_texts_equal_transformers(opened: Callable[[str], Architecture], tmp_path: Path, name: str) -> None:
    from tokenizers import Tokenizer

    arch, known = opened(name), sight.reference(name)
    assert arch.sight is not None
    seen, tokenizer = arch.sight, Tokenizer.from_file(str(arch.source.path / "tokenizer.json"))
    part = write_model(tmp_path, arch, ModelSpec("fp32")).part
    assert part.image == seen.image
    places, native = read_places(tmp_path, seen.image), natively(tmp_path, part)
    for at, picture in enumerate(sight.pictures()):
        found, features = process(picture, seen.image), known[f"features.{at}"]
        assert tokenizer.encode(found.text).ids == known[f"text.{at}"].tolist()
        plain = seen.image.model_copy(update={"deepstack_layers": []})  # numpy computes no taps
        ways = [(native, seen.image), *([] if seen.image.windows else [(in_numpy(seen), plain)])]
        for encode, image in ways:
            rows = rows_of(image, found, places, encode)
            assert len(rows) == known[f"text.{at}"].tolist().count(sight.IMAGE) <= seen.image.max_rows
            np.testing.assert_allclose(rows[:: sight.EVERY], features[:, : rows.shape[1]], atol=1e-4, rtol=0)
        assert rows_of(seen.image, found, places, native).shape[1] == features.shape[1] == arch.inserts


def test_deepstack_in_another_order_and_beyond(tmp_path: Path) -> None:
    """The decoder adds rows in the tower's order, each by the merger that the list gives its layer."""
    folder = sight.write_case(tmp_path, "qwen3_vl")
    config = json.loads((folder / "config.json").read_text("utf-8"))

    def listed(layers: list[int]) -> Architecture:
        config["vision_config"]["deepstack_visual_indexes"] = layers
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        return open_model(folder, None)

    usual, turned = listed([0, 2]).sight, listed([2, 0]).sight
    assert usual is not None
    assert turned is not None
    assert turned.image.deepstack_layers == usual.image.deepstack_layers == [1, 3]
    for mine, theirs in zip(turned.projectors, [usual.projectors[at] for at in (0, 2, 1)], strict=True):
        name = next(iter(mine.tensors))
        np.testing.assert_array_equal(mine.source.read(name), theirs.source.read(name))
    for wrong in ([0, 0], [-1], list(range(40))):
        with pytest.raises(ExportError, match="deepstack_visual_indexes"):
            listed(wrong)


@pytest.mark.parametrize("form", ["int8", "int4", "w8a8"])
def test_quantized_towers_give_nearly_the_same(
    opened: Callable[[str], Architecture], tmp_path: Path, form: Format
) -> None:
    arch = opened("lfm2_vl")
    assert arch.sight is not None
    part = write_model(tmp_path, arch, ModelSpec(form)).part
    assert [side.format for side in part.sides] == ["int8" if form == "int4" else form] * 2
    found, places = process(sight.pictures()[0], arch.sight.image), read_places(tmp_path, arch.sight.image)
    exact, near = (
        rows_of(arch.sight.image, found, places, one) for one in (in_numpy(arch.sight), natively(tmp_path, part))
    )
    assert np.abs(near - exact).mean() < 0.05 * exact.std()
    said = tower_note(arch.sight, tmp_path, part, 1)
    assert said is not None
    assert 0.1 < float(said.split()[-4].rstrip("%")) < 10


@pytest.mark.parametrize(
    "name, limits",
    [
        ("idefics3", (16, 40, 90)),
        ("lfm2_vl", (3, 16, 60)),
        ("qwen3_vl", (1, 9, 30)),
        ("internvl", (16, 50, 99)),
        ("gemma3", (9,)),
        ("gemma4", (1, 9, 40)),
    ],
)
def test_an_image_has_no_more_rows_than_was_asked_for(
    opened: Callable[[str], Architecture], name: str, limits: tuple[int, ...]
) -> None:
    for rows in limits:
        arch = opened(name)
        limit_images(arch, rows)
        assert arch.sight is not None
        made = [
            process(one, arch.sight.image).text.count(arch.sight.image.prompt_template.token)
            for one in sight.pictures()
        ]
        assert max(made) <= arch.sight.image.max_rows <= rows
    with pytest.raises(InvalidRequest, match="at least"):
        limit_images(opened(name), 0)
    with pytest.raises(InvalidRequest, match="reads no images"):
        limit_images(open_model(arch.source.path, None, text_only=True), 9)


def test_what_reads_images_is_said(opened: Callable[[str], Architecture]) -> None:
    said = "reads images: a tower of 2 layers with 3 heads, up to 112 rows each"
    arch = opened("lfm2_vl")
    assert said in traits(arch)
    (half, *others) = traits(open_model(arch.source.path, None, text_only=True))
    assert "text half" in half
    assert not any("images" in one for one in others)


@pytest.mark.parametrize(
    "name, file, change, words",
    [
        ("gemma3", "preprocessor", {"do_pan_and_scan": True}, "pan and scan"),
        ("gemma3", "preprocessor", {"size": {"height": 64, "width": 64}}, "pictures of 64 pixels"),
        ("gemma4_large", "config", {"audio_config": {"hidden_size": 48}}, "see each other"),
        ("idefics3", "preprocessor", {"max_image_size": {"longest_edge": 60}}, "tiles of 60 pixels"),
        ("idefics3", "preprocessor", {"resample": 4}, "resample 4"),
        ("internvl", "preprocessor", {"size": {"height": 56, "width": 56}}, "expected squares of 64 pixels"),
        ("internvl", "config", {"vision_feature_layer": -2}, "rows of layer -2"),
        ("lfm2_vl", "preprocessor", {"do_normalize": False}, "do_normalize"),
        ("lfm2_vl", "preprocessor", {"tile_size": 72}, "tiles of 72 pixels"),
        ("lfm2_vl", "preprocessor", {"encoder_patch_size": 16}, "patches of 16 pixels, and the tower reads 8"),
        ("lfm2_vl", "config", {"downsample_factor": 1}, "linear_1|fc1|shape"),
        ("qwen3_vl", "config", {"vision_config": [1]}, "cannot be understood"),
        ("qwen3_vl", "preprocessor", {"image_mean": "x"}, "cannot be understood"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, name: str, file: str, change: dict[str, object], words: str
) -> None:
    folder = sight.write_case(tmp_path, name)
    path = folder / f"{file}_config.json"
    path = path if path.is_file() else folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ExportError, match=words):
        open_model(folder, None)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ExportError, match="no preprocessor_config"):
        open_model(folder, None)
