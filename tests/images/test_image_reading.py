"""Pictures of every kind become upright red, green and blue, or an error that says why not."""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import InvalidRequest
from edgespec.runtimes.images.reading import from_data_url, open_picture, read

pytest.importorskip("PIL", reason="needs edgespec[images]")
from PIL import Image

RAMP = np.stack([*np.meshgrid(np.arange(23) * 11, np.arange(17) * 15, indexing="ij"), np.full((23, 17), 90)], -1)
RAMP = RAMP.astype(np.uint8)  # [23, 17, 3]: no two corners alike


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def rgb() -> Image.Image:
    return Image.fromarray(RAMP)


def with_alpha() -> bytes:
    alpha = np.where(np.arange(17) < 8, 0, 255).astype(np.uint8)
    return saved(Image.fromarray(np.dstack([RAMP, np.broadcast_to(alpha, (23, 17))])), "png")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    other = Image.new("RGB", rgb().size, "red")
    return saved(rgb(), kind, save_all=True, append_images=[other, other], duration=50, **LOSSLESS.get(kind, {}))


def plain(kind: str) -> bytes:
    return saved(rgb(), kind, **LOSSLESS.get(kind, {}))


LOSSLESS: dict[str, dict[str, Any]] = {"webp": {"lossless": True}}
FILES: dict[str, Callable[[], bytes]] = {
    **{kind: partial(plain, kind) for kind in ("png", "jpeg", "webp", "bmp", "gif")},
    "jpeg, cmyk": lambda: saved(rgb().convert("CMYK"), "jpeg", quality=95),
    "jpeg, progressive": lambda: saved(rgb(), "jpeg", quality=95, progressive=True),
    "png, palette": lambda: saved(rgb().quantize(256), "png"),
    "png, animated": lambda: animated("png"),
    "webp, animated": lambda: animated("webp"),
    "gif, animated": lambda: animated("gif"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind(tmp_path: Path, name: str) -> None:
    data = FILES[name]()
    (tmp_path / "x").write_bytes(data)
    for source in (data, tmp_path / "x", str(tmp_path / "x")):
        found = open_picture(source)
        assert found.pixels.dtype == np.uint8
        off = np.abs(found.pixels.astype(int) - RAMP)
        exact = name in ("png", "webp", "bmp", "png, animated", "webp, animated")
        assert off.max() == 0 if exact else off.mean() < 14, name
        assert ("animated: its first frame" in found.note) == ("animated" in name)


def test_grays_of_16_bits_bits_and_transparency() -> None:
    deep = np.arange(400, dtype=np.uint16).reshape(20, 20) * 160
    found = read(saved(Image.fromarray(deep), "png"))
    assert (found == (deep >> 8)[..., None]).all()
    bits = Image.fromarray(RAMP[..., 0] > 99)
    assert (read(saved(bits, "png"))[..., 1] == np.where(RAMP[..., 0] > 99, 255, 0)).all()
    found = read(with_alpha())
    assert (found[:, :8] == 255).all()  # over white
    assert (found[:, 8:] == RAMP[:, 8:]).all()
    seen = Image.fromarray(RAMP[..., 0])
    assert (read(saved(seen, "png", transparency=0))[0] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_data_say(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(rgb(), "png", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    assert (read(data) == np.asarray(expected)).all()


BAD = {
    b"": "no picture of a known kind",
    b"%PDF-1.7": "no picture of a known kind",
    b"\x89PNG\r\n\x1a\n": "damaged or truncated",
    FILES["png"]()[:60]: "damaged or truncated",
    FILES["jpeg"]()[:300]: "damaged or truncated",
    FILES["webp"]()[:40]: "damaged or truncated",
    bomb(30_000, 30_000): "30000 x 30000 pixels: expected at most",
    bomb(2**31 - 1, 2**31 - 1): "pixels: expected at most",
    bomb(0, 5): r"0 x 5 pixels|damaged",
    bomb(6000, 6000): "damaged or truncated",
}


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=BAD[data]):
        read(data)


def test_files_that_are_none_and_no_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tmp_path, tmp_path / "none", "/dev/zero", "a\0b"):
        with pytest.raises(InvalidRequest, match=r"is no file|cannot be read"):
            read(name)
    with pytest.raises(InvalidRequest, match="17 x 23 pixels: expected at most 100"):
        read(FILES["png"](), most_pixels=100)
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", None)
    with pytest.raises(InvalidRequest, match=r"Pillow.*\n.*\.\[images\]"):
        read(FILES["png"]())


def test_data_urls() -> None:
    png = FILES["png"]()
    text = base64.encodebytes(png).decode()  # with line ends
    assert from_data_url(f"data:image/png;base64,{text}") == png
    for url in (
        "https://example.org/x.png",
        "data:text/html;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,*",
    ):
        with pytest.raises(InvalidRequest, match=r"expected a picture's data URL|no base64"):
            from_data_url(url)


SEEDS = [make() for make in FILES.values()] + [with_alpha()]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_pictures_or_refused(data: st.DataObject) -> None:
    """Bytes changed, put in, and left out: a picture within the limit, or a clear error."""
    made = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(made) - 1, 200)) | st.integers(0, len(made) - 1))
        cut = data.draw(st.sampled_from([0, 1, 4, len(made)]))
        made[at : at + cut] = data.draw(st.binary(max_size=4))
        if len(made) < 2:
            break
    try:
        found = read(bytes(made), most_pixels=4096)
    except InvalidRequest:
        return
    assert found.dtype == np.uint8
    assert found.ndim == 3
    assert found.shape[2] == 3
    assert 1 <= found.size <= 3 * 4096
