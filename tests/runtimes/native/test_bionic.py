"""Android: the native sources compiled for it give the same bits and texts on real bionic, in an emulator."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from tests.conftest import PROMPTS
from tests.support import rust_tokenizer
from tests.support.bionic import PAGE, Bionic
from tests.support.selftest import NATIVE, PARTS, TESTS, build, host_compiler, host_isas

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]  # all is built first
EXAMPLE = NATIVE.parents[1] / "examples" / "c" / "greedy.c"
NEW = 24


@pytest.fixture(scope="module")
def bionic(tmp_path_factory: pytest.TempPathFactory) -> Bionic:
    return Bionic(tmp_path_factory.mktemp("bionic"))


def test_kernels_compute_the_same_bits(bionic: Bionic, tmp_path: Path) -> None:
    host = build(tmp_path, host_compiler() or "c++", host_isas())
    expected = host.run("hash", host.isas[-1]).splitlines()
    selftest = bionic.program(TESTS / f"{PARTS[0]}.cpp")
    assert bionic.run(selftest, "isas").split() == ["scalar", "neon"]
    for isa in ("scalar", "neon"):
        assert bionic.run(selftest, "hash", isa).splitlines() == expected, isa
    assert bionic.run(selftest, "numbers").startswith("ok (neon)")


def test_segments_fit_pages_of_16_kib(bionic: Bionic) -> None:
    data = bionic.program(EXAMPLE).read_bytes()
    (table,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, table + i * size) for i in range(count)]
    loaded = [header for header in headers if header[0] == 1]
    assert loaded
    for _, _, offset, address, *_, align in loaded:
        assert align == PAGE
        assert (address - offset) % PAGE == 0


def test_texts_are_those_of_the_engine(bionic: Bionic, engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine, greedy = engines("native"), bionic.program(EXAMPLE)
    bundle = shutil.copytree(engine.bundle.path, greedy.parent / "bundle")
    ends = ",".join(map(str, engine.bundle.manifest.tokenizer.eos))
    for prompt in map(engine.codec.encode, PROMPTS[:2]):
        said = bionic.run(greedy, str(bundle / "model.native.onnx"), str(NEW), ends, *map(str, prompt))
        expected = engine.generate(prompt, method="ar", max_new_tokens=NEW).tokens
        assert [int(token) for token in said.split("\n")[0].split()] == expected
    # the same from text to text, by the tokenizer's library
    target = Path(os.environ.get("CARGO_TARGET_DIR") or tmp_path)
    reader = bionic.program(EXAMPLE, rust_tokenizer.build(target, rust_tokenizer.ANDROID) / "libedgespec_tokenizer.a")
    for text in PROMPTS[:2]:
        said = bionic.run(
            reader, str(bundle / "model.native.onnx"), str(NEW), ends, str(bundle / "tokenizer.json"), text
        )
        assert said.startswith(engine.generate(text, method="ar", max_new_tokens=NEW).text + "\n")
