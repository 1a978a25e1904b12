"""Four and eight bits in one model: what is measured, what is chosen, and that the bundle is what was chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import INDEX, ModelSpec, open_model
from edgespec.export.bundle.sizes import weight_bytes
from edgespec.export.loading import load_source
from edgespec.export.measuring.mixer import TOKENS, Mixer
from edgespec.export.measuring.variants import EMBEDDING, HEAD, MEMORY, Choice, Rounded, VariantOps
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.quantization.levels import Blocks, dequantize_block
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.planning.budget import show_bytes
from edgespec.planning.weights import matrix_bytes, weight_parts
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import FileEntry, Layout
from tests.conftest import TARGET
from tests.support import seq2seq

TEXT = np.random.default_rng(5).integers(2, 90, 40).tolist()
ROWS = list(range(10, 40))
INT4 = WeightChoice.of("int4", "rtn", None)
# what differs from part to part: tied heads or not, experts, shared keys, embeddings of layers, states, parallel parts
KINDS = ("llama_tied_gqa", "olmoe_eight", "gemma4_shared", "qwen3_5_delta", "lfm2_conv", "gpt_neox_parallel")


class OneByOne:
    """A checkpoint in which some tensors read as rounded: the plain way."""

    def __init__(self, source: Any, names: set[str]) -> None:
        self.source, self.names, self.quantize = source, names, QUANTIZERS["rtn"].prepare(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, name: str, *part: slice) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.source.read(name, *part)
        return dequantize_block(*self.quantize(values, Blocks(4)), values.shape[1], 4) if name in self.names else values

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        yield self.read(name)


def kl(exact: NDArray[np.float32], ours: NDArray[np.float32]) -> float:  # [R, vocab]
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (exact, ours))
    return float((p * np.log(p / q)).sum(-1).mean())


def mean_bits(index: Any) -> float:
    """Return the mean bits of the weights of layers, as stored in the weight file."""
    own = [entry for name, entry in index["matrices"].items() if ".layers." in name and not name.startswith("medusa")]
    sizes = [(entry["n"] * entry["k"], 4 if entry["kind"] == "q4" else 8) for entry in own]
    return sum(size * bits for size, bits in sizes) / sum(size for size, _ in sizes)


@pytest.fixture
def opened(checkpoint: Callable[[str], Path]) -> Callable[[str], Architecture]:
    return lambda kind: open_model(checkpoint(kind), None)


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_are_those_of_rounding_one_at_a_time(opened: Callable[[str], Architecture], kind: str) -> None:
    arch = opened(kind)
    mixer = Mixer(arch, INT4, "native", None, TEXT)
    own = [] if arch.embedding == arch.head.weight else [EMBEDDING]
    assert len(mixer.parts) == 2 * arch.facts.layers + 1 + len(own)
    first, last = next(part for part in mixer.parts if part != EMBEDDING), f"mlp.{arch.facts.layers - 1}"
    choices = [*(Choice({part}) for part in (*own, first, last, HEAD)), Choice({*own, first, last, HEAD}), Choice()]
    rounded = Rounded(arch.source, frozenset().union(*mixer.matrices.values()), QUANTIZERS["rtn"], Blocks(4))
    found = VariantOps(arch, TEXT, ROWS, choices, rounded).divergences()
    source, exact = arch.source, reference_logits(arch, TEXT, ROWS)
    for choice, value in zip(choices, found, strict=True):
        names = {name for part in choice for name in mixer.matrices[part]}
        arch.source = OneByOne(source, names)  # type: ignore[assignment]
        assert value == pytest.approx(kl(exact, reference_logits(arch, TEXT, ROWS)), rel=2e-3, abs=2e-6)
        assert (value > 1e-5) == bool(choice)


@pytest.mark.parametrize("kind", ["marian", "t5_gated_untied"])
def test_divergences_behind_a_source_are_those_of_rounding_one_at_a_time(tmp_path: Path, kind: str) -> None:
    arch = open_model(seq2seq.write_case(tmp_path, kind), None)
    text, encoded = [token % 120 for token in TEXT], seq2seq.reference(kind)["encoded"][None]
    mixer = Mixer(arch, INT4, "native", None, text, read=encoded, beside=1000)
    assert mixer.bytes([]) == weight_bytes(arch, "int4") + 1000
    choices = [Choice({part}) for part in (MEMORY, "attention.1", "mlp.0")]
    choices = [*choices, Choice().union(*choices)]
    rounded = Rounded(arch.source, frozenset().union(*mixer.matrices.values()), QUANTIZERS["rtn"], Blocks(4))
    found = VariantOps(arch, text, ROWS, choices, rounded, floats=encoded).divergences()
    source, exact = arch.source, reference_logits(arch, text, ROWS, floats=encoded)
    for choice, value in zip(choices, found, strict=True):
        names = {name for part in choice for name in mixer.matrices[part]}
        arch.source = OneByOne(source, names)  # type: ignore[assignment]
        assert value == pytest.approx(kl(exact, reference_logits(arch, text, ROWS, floats=encoded)), rel=2e-3)
        assert value > 1e-5


@pytest.mark.parametrize("layout", ["native", "stock"])
def test_bytes_are_kept_and_spent_where_they_help(layout: Layout) -> None:
    arch = open_model(resolve(TARGET), None)
    mixer = Mixer(arch, INT4, layout, None, TEXT)
    smallest, largest = weight_bytes(arch, "int4", None, layout), weight_bytes(arch, "int8", None, layout)
    left = []
    for share in (0, 0.5, 1):
        size = round(smallest + share * (largest - smallest))
        mix = mixer.allocate_for_size(size)
        assert weight_bytes(arch, "int4", mix.choice.head, layout, None, mix.choice.fine) == mix.facts["bytes"] <= size
        left.append(mix.facts.get("divergence_left", 0.0))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[1] > left[2] == 0
    assert mixer.allocate_for_size(smallest).facts["int8"] == []
    with pytest.raises(ExportError, match="expected at least"):
        mixer.allocate_for_size(smallest - 1)


def test_what_a_byte_saves_comes_first() -> None:
    """The first part to become int8 is the one whose rounding costs most for its size, by the plain way."""
    arch = open_model(resolve(TARGET), None)
    mixer = Mixer(arch, INT4, "native", None, TEXT)
    rows = range(len(TEXT) // 4, len(TEXT))
    source, exact, worth = arch.source, reference_logits(arch, TEXT, list(rows)), {}
    for part in mixer.parts:
        names = mixer.matrices[part]
        arch.source = OneByOne(source, set(names))  # type: ignore[assignment]
        worth[part] = kl(exact, reference_logits(arch, TEXT, list(rows))) / sum(np.prod(source.shape(n)) for n in names)
    arch.source = source
    best = max(worth, key=lambda part: worth[part])
    assert mixer.allocate_for_size(mixer.bytes([best])).facts["int8"] == [best]


def test_a_goal_of_divergence_is_reached_with_few_bytes() -> None:
    arch = open_model(resolve(TARGET), None)
    mixer = Mixer(arch, INT4, "native", None, TEXT)
    curve = {int(size): value for size, value in mixer.allocate_for_kl(1e-9).facts["divergence_by_bytes"].items()}
    assert sorted(curve.values(), reverse=True) == list(curve.values())  # more bytes, less divergence
    size, goal = list(curve.items())[3]
    assert mixer.allocate_for_kl(goal * 1.01).facts["bytes"] == size
    assert set(mixer.allocate_for_kl(1e-9).facts["int8"]) == set(mixer.parts)  # as near as it gets


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("head", [None, "int8"])
def test_a_bundle_is_what_was_chosen(tmp_path: Path, head: Any) -> None:
    """Mixed weights run on both operators, with every method's text that of plain decoding."""
    arch = open_model(resolve(TARGET), None)
    size = (weight_bytes(arch, "int4", head) + weight_bytes(arch, "int8")) // 2
    skip = tmp_path / "skip.json"
    skip.write_text('{"attention": [1], "mlp": [0]}', "utf-8")
    options = ExportOptions(
        TARGET, tmp_path / "out", ("self-spec", "medusa"), target_size=size, head_format=head, skip_set=skip, threads=1
    )
    manifest = export_model(options, golden=False)
    mixed, part = manifest.provenance["mixed"], manifest.target
    assert 0 < len(mixed["int8"]) < mixed["parts"]
    assert head is None or HEAD not in mixed["divergence_alone"]
    sizes = manifest.memory["weight_bytes"]
    assert sizes["target"] + sizes["heads"] == mixed["bytes"] <= size
    index = json.loads((tmp_path / "out" / str(part.index)).read_text("utf-8"))
    kinds = {name: entry["kind"] for name, entry in index["matrices"].items() if entry["kind"] in ("q4", "p8")}
    fine = {
        name.split(".")[2] + "." + name.split(".")[3]
        for name, kind in kinds.items()
        if ".layers." in name and kind == "p8"
    }
    wanted = (name.split(".") for name in mixed["int8"] if name != HEAD)
    assert fine == {f"{layer}.{'self_attn' if kind == 'attention' else 'mlp'}" for kind, layer in wanted}
    assert part.int8_fraction == pytest.approx(mean_bits(index) / 4 - 1, abs=0.02)
    texts = set()
    for operators in ("native", "stock"):
        with load(tmp_path / "out", operators=operators, threads=1) as engine:
            plain = engine.generate("KING RICHARD:\n", method="ar", max_new_tokens=24).text
            for method in ("self-spec", "medusa", "ngram"):
                assert engine.generate("KING RICHARD:\n", method=method, max_new_tokens=24).text == plain
            texts.add(plain)
    assert all(texts)
    assert Bundle.open(tmp_path / "out").manifest == manifest


@pytest.mark.parametrize("head", [None, "int8"])
def test_an_embedding_of_its_own_is_chosen_by_itself(
    checkpoint: Callable[[str], Path], tmp_path: Path, head: Any
) -> None:
    """The part is stored in its chosen format, for any format of the head; the planner counts its rows the same way."""
    folder = checkpoint("qwen2_untied")
    arch = open_model(folder, None)
    mixer = Mixer(arch, WeightChoice.of("int4", "rtn", head), "native", None, TEXT)
    assert (EMBEDDING in mixer.parts, HEAD in mixer.parts) == (True, head is None)
    assert mixer.matrices[EMBEDDING] == {arch.embedding}
    found = write_model(tmp_path, arch, ModelSpec("int4", head=head, fine=mixer.matrices[EMBEDDING])).part
    assert (found.embedding_format, found.head_format, found.int8_fraction) == ("int8", head, 0)
    index = json.loads((tmp_path / INDEX).read_text("utf-8"))["matrices"]
    assert index[arch.embedding]["kind"] == "p8"
    assert {entry["kind"] for name, entry in index.items() if ".layers." in name} == {"q4"}
    size = (tmp_path / found.weights).stat().st_size
    assert size == mixer.bytes([EMBEDDING])
    parts = weight_parts(found, {found.weights: FileEntry(size=size, sha256="0" * 64)})
    assert parts.row == matrix_bytes("int8", 16, arch.facts.hidden) // 16


def test_more_bytes_are_nearer_to_the_source(tmp_path: Path) -> None:
    """The bundle itself, with its activations in 8 bits, on another part of the text."""
    arch, found = open_model(resolve(TARGET), None), []
    smallest, largest = weight_bytes(arch, "int4"), weight_bytes(arch, "int8")
    for share in (0.0, 0.5, 1.0):
        options = ExportOptions(
            TARGET, tmp_path / f"{share}", target_size=round(smallest + share * (largest - smallest))
        )
        found.append(export_model(options, golden=False).parity["kl"])
    assert found[0] > found[1] > found[2] > 0


def test_a_draft_stays_int4(tmp_path: Path) -> None:
    options = ExportOptions(
        TARGET,
        tmp_path / "out",
        ("speculative",),
        draft="builtin:shakespeare-draft",
        target_kl=1e-9,
        threads=1,
        quick=True,
    )
    export_model(options, golden=False)
    index = json.loads((tmp_path / "out" / "draft" / "model.weights.json").read_text("utf-8"))
    assert {entry["kind"] for entry in index["matrices"].values()} == {"q4"}


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    for options, message in (
        ({"target_size": 1, "target_kl": 0.1}, "expected one of them"),
        ({"target_size": 1 << 30, "format": "int8"}, "expected int4"),
        ({"target_kl": 0.1, "format": "fp32"}, "expected int4"),
        ({"target_kl": math.nan}, "expected a positive number"),
        ({"target_kl": -1.0}, "expected a positive number"),
        ({"target_size": 0}, "expected a positive number"),
    ):
        with pytest.raises(ExportError, match=message):
            load_source(ExportOptions(TARGET, tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()
    assert TOKENS < 512  # the source runs once for each part


def test_a_dry_run_measures_nothing_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    arch = open_model(resolve(TARGET), None)
    smallest, largest = weight_bytes(arch, "int4"), weight_bytes(arch, "int8")
    made = dry_run(ExportOptions(TARGET, tmp_path / "out", target_size=10 * largest))
    assert made["weight_bytes"]["target"] == smallest
    assert show_bytes(largest) in made["notes"][-1]
    assert "parts become int8" in dry_run(ExportOptions(TARGET, tmp_path / "out", target_kl=0.1))["notes"][-1]
    with pytest.raises(ExportError, match="--target-size"):
        dry_run(ExportOptions(TARGET, tmp_path / "out", target_size=smallest - 1))
