"""``--precision high``: an int8 bundle as a model of 4 bits, whose low planes are never touched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.app import cli
from edgespec.drafters.registry import complete
from edgespec.engine.loading import load
from edgespec.engine.prompt_cache import origin_of
from edgespec.errors import BundleError, InvalidRequest
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import RunOptions
from tests.conftest import TARGET

pytestmark = pytest.mark.usefixtures("native")
PROMPT = "ROMEO:\nWhat"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edgespec.export(TARGET, tmp_path_factory.mktemp("planes") / "int8", format="int8", methods=["swift"])


def test_a_text_of_its_own(bundle: Path) -> None:
    """Every method reproduces plain decoding at this precision, and the result names the precision."""
    with load(bundle) as both, load(bundle, precision="high") as high:
        full = both.generate(PROMPT, method="ar", max_new_tokens=40)
        plain = high.generate(PROMPT, method="ar", max_new_tokens=40)
        assert plain.tokens != full.tokens
        assert plain.approximations[0] == "the high 4 bits of int8 weights"
        assert full.approximations[0] == "int8 weights"
        for method in ("ngram", "swift"):
            assert high.generate(PROMPT, method=method, max_new_tokens=40, fallback=False).tokens == plain.tokens
        assert origin_of(both.bundle.manifest, both.model) != origin_of(high.bundle.manifest, high.model)


def test_verify_proves_it(bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(f"{PROMPT.splitlines()[0]}\nJULIET:\n")
    words = [str(bundle), "--precision", "high", "--prompts", str(prompts), "--json"]
    found = json.loads(CliRunner().invoke(cli, ["verify", *words], catch_exceptions=False).stdout)
    assert found["passed"]
    assert found["golden"]["of"] == 0  # those are int8's


LOOK = """
import json, re, sys
from pathlib import Path
from edgespec.engine.loading import load
folder, precision = Path(sys.argv[1]), sys.argv[2]
with load(folder, precision=precision, prompt_cache=False) as engine:
    engine.generate("ROMEO:", max_new_tokens=30)
    rows, at = [], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"[0-9a-f]+-[0-9a-f]+ \\S+ ([0-9a-f]+) .*model[.]data$", line):
            at = int(found[1], 16)
        elif re.match("[0-9a-f]+-", line):
            at = None
        elif at is not None and line.startswith("Rss:"):
            rows.append([at, int(line.split()[1])])
print(json.dumps(rows))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which is Linux")
def test_low_planes_are_never_touched(bundle: Path) -> None:
    native = json.loads((bundle / "model.weights.json").read_text("utf-8"))["native"]
    first = min(offset for name, (offset, *_) in native.items() if name.endswith(".low"))

    def resident(precision: str) -> tuple[int, int]:
        """KiB of the weight file before the low planes, and of these."""
        done = subprocess.run([sys.executable, "-c", LOOK, str(bundle), precision], capture_output=True, check=True)
        rows = json.loads(done.stdout)
        low = sum(size for at, size in rows if at >= first // 4096 * 4096)
        return sum(size for _, size in rows) - low, low

    (before, low), (same, none) = resident("full"), resident("high")
    assert low > 100
    assert none == 0
    assert same == pytest.approx(before, rel=0.1)


def test_plans_count_the_high_planes(bundle: Path, tmp_path: Path) -> None:
    """The size is within 3 % of an int4 bundle's weights, and every report names it."""
    manifest = complete(read_manifest(bundle))
    high = manifest.at_high_precision()
    four = read_manifest(edgespec.export(TARGET, tmp_path / "int4", format="int4"))
    name = manifest.target.weights
    assert high.files[name].size == pytest.approx(four.files[name].size, rel=0.03)
    use = RunOptions("ar", "native", 512)
    assert memory_of(manifest, use).peak - memory_of(high, use).peak > 0.9 * manifest.target.low_nibble_bytes
    shown = CliRunner().invoke(cli, ["info", str(bundle)], catch_exceptions=False).stdout
    assert "--precision high" in shown
    quality, alone = manifest.parity, manifest.parity["high_precision"]
    assert quality["kl"] < alone["kl"] < 1
    assert (high.parity["kl"], high.parity["perplexity"]) == (alone["kl"], alone["perplexity"])
    assert f"divergence {alone['kl']:.3g} nats ({quality['kl']:.3g} with both planes)" in shown.replace("\n", " ")
    plan = CliRunner().invoke(cli, ["plan", str(bundle), "--json"], catch_exceptions=False).stdout
    found = json.loads(plan)["candidates"]
    assert {one["precision"]: one["kl"] for one in found} == {"full": quality["kl"], "high": alone["kl"]}
    table = CliRunner().invoke(cli, ["plan", str(bundle)], catch_exceptions=False).stdout
    assert re.search(rf"^pick +int8 +{quality['kl']:.2g} ", table, re.MULTILINE)
    assert re.search(rf"^ +int4 high +{alone['kl']:.2g} ", table, re.MULTILINE)
    assert json.loads(plan)["pick"]["precision"] == "full"


def test_what_has_no_planes_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"precision 'low': expected full or high"):
        load(bundle, precision="low")
    with pytest.raises(InvalidRequest, match=r"native operators, and this is stock's"):
        load(bundle, precision="high", operators="stock")
    four = edgespec.export(TARGET, tmp_path / "int4", format="int4")
    with pytest.raises(InvalidRequest, match=r"weights are int4, expected int8 in two planes(.|\n)*--format int8"):
        load(four, precision="high")


@pytest.mark.parametrize("plane", ["packed", "low"])
def test_a_plane_that_was_altered_is_found(bundle: Path, tmp_path: Path, plane: str) -> None:
    for file in bundle.rglob("*"):
        if file.is_file():
            (tmp_path / file.relative_to(bundle)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file.relative_to(bundle)).write_bytes(file.read_bytes())
    native = json.loads((tmp_path / "model.weights.json").read_text("utf-8"))["native"]
    offset, length = next(entry[:2] for name, entry in native.items() if name.endswith(f".{plane}"))
    weights = np.memmap(tmp_path / "model.data", np.uint8, "r+")
    weights[offset + length // 2] ^= 1
    weights.flush()
    for precision in ("full", "high"):
        with pytest.raises(BundleError, match=re.escape("model.data")):
            load(tmp_path, precision=precision)
