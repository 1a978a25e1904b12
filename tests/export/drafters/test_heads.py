"""Trained heads: reading, cutting their LM head, exporting and using them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.drafters.head_choice import HeadChoice, cut_draft, frequent_tokens, head_vocab, write_tokens
from edgespec.export.drafters.heads import (
    DESCRIPTION,
    TENSORS,
    HeadsFile,
    TrainedHeads,
    model_fingerprint,
    read_heads,
    tokenizer_fingerprint,
)
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.derived import ExtendedCheckpoint, chosen_rows, held
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import Layout, Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.text.codec import TextCodec
from tests.conftest import PROMPTS, TARGET
from tests.support.checkpoints import make_heads
from tests.support.passes import run_heads, states

KINDS = ("medusa", "blockwise", "paradecode")
HIDDEN, VOCAB = 128, 1024


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return make_heads(tmp_path / "heads", "medusa", TARGET, count=2)


def describe(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / DESCRIPTION).read_text()) | changes
    (folder / DESCRIPTION).write_text(json.dumps(data))


def options(tmp_path: Path, folder: Path | None, method: str = "medusa", **rest: Any) -> ExportOptions:
    names = [] if folder is None else [str(folder)]
    return ExportOptions(TARGET, tmp_path / "bundle", methods=[method], heads=names, **rest)


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(ExportError) as caught:
        read_heads(folder)
    for part in said:
        assert part in str(caught.value)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ours(tmp_path: Path, kind: str) -> None:
    found = read_heads(make_heads(tmp_path / kind, kind, TARGET))
    assert found.file.kind == kind
    assert [group.kind for group in found.file.groups] == (["exit"] * 2 if kind == "paradecode" else [kind])


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", "expected a folder with trained heads", "edgespec train")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", DESCRIPTION, "medusa_lm_head.pt")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "eagle"}, "kind"),
        ({"count": 0}, "count"),
        ({"color": "red"}, "color"),
        ({"schema_version": 9}, "schema 9 is newer"),
        ({"count": 3}, "medusa.2.weight is missing"),
        ({"hidden": 64}, "has shape [128, 128], expected [64, 64]"),
    ],
)
def test_a_wrong_description(heads: Path, changes: dict[str, Any], said: str) -> None:
    describe(heads, **changes)
    refused(heads, said)


def test_damaged_files(heads: Path) -> None:
    tensors = load_file(heads / TENSORS)
    tensors["medusa.0.bias"][3] = np.nan
    save_file(tensors, heads / TENSORS)
    refused(heads, "medusa.0.bias holds NaN")
    (heads / TENSORS).write_bytes(b"123")
    refused(heads, "not a readable safetensors file")
    (heads / DESCRIPTION).write_text("{")
    refused(heads, "not readable as JSON")


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "model.safetensors"])  # of Medusa-1, Medusa-2
def test_published_layouts(tmp_path: Path, prefix: str, own: bool, file: str) -> None:
    """Names of the Medusa repository; the configuration may be wrong about the number of heads."""
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": np.ones(4, np.float32)} if prefix else {}
    for i in range(3):
        tensors[f"{prefix}{i}.0.linear.weight"] = rng.standard_normal((8, 8)).astype(np.float32)
        tensors[f"{prefix}{i}.0.linear.bias"] = np.zeros(8, np.float32)
        if own:
            tensors[f"{prefix}{i}.1.weight"] = rng.standard_normal((20, 8)).astype(np.float32)
    save_file(tensors, tmp_path / file)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "vocab_size": 20, "model_type": "llama"}')
    if not prefix and file.startswith("model"):
        refused(tmp_path, "has neither")
        return
    found = read_heads(tmp_path)
    assert (found.file.count, found.file.hidden, found.file.vocab, found.file.own) == (3, 8, 20, own)
    for i in range(3):
        got = found.tensors[f"medusa.{i}.weight"].read(slice(None), None)
        np.testing.assert_array_equal(got, tensors[f"{prefix}{i}.0.linear.weight"])


@pytest.mark.parametrize(
    "shape, config", [((), "{}"), ((4, 4), '{"vocab_size": []}'), ((4, 4), '{"vocab_size": -5}'), ((0, 0), "{}")]
)
def test_published_heads_of_no_size(tmp_path: Path, shape: tuple[int, ...], config: str) -> None:
    (tmp_path / "config.json").write_text(config, "utf-8")
    save_file({"0.0.linear.weight": np.zeros(shape, np.float32)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ExportError, match="medusa_lm_head"):
        read_heads(tmp_path)


def test_published_heads_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.safetensors"
    save_file({"0.0.linear.weight": np.zeros((8, 8), np.float32)}, file)
    refused(tmp_path, "medusa.0.bias is missing")
    deep = {f"0.{layer}.linear.{part}": np.zeros((8, 8), np.float32) for layer in (0, 1) for part in ("weight", "bias")}
    save_file(deep, file)
    refused(tmp_path, "more than one layer")
    save_file({"weight": np.zeros(3, np.float32)}, file)
    refused(tmp_path, "holds no Medusa heads")
    save_file({f"{i}.0.linear.weight": np.zeros((8, 8), np.float32) for i in (0, 2)}, file)
    refused(tmp_path, "expected heads 0, 1, ..., got [0, 2]")


def test_torch_files_without_torch_or_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"nonsense")
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        refused(tmp_path, "torch is not installed", ".[train]")
    else:
        refused(tmp_path, "not a torch file of plain tensors")


def test_torch_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="published heads may be torch files: needs edgespec[train]")
    state = {"0.0.linear.weight": torch.full((8, 8), 0.5, dtype=torch.float16), "0.0.linear.bias": torch.zeros(8)}
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    found = read_heads(tmp_path)
    assert found.tensors["medusa.0.weight"].read(slice(None), None).tolist() == [[0.5] * 8] * 8

    class Code:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    torch.save({"0.0.linear.weight": Code()}, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "not a torch file of plain tensors")


# -- whose heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab": 512}, ("vocabulary 512", "1024")),
        ({"model": "ab" * 32}, ("model with fingerprint abababababab", "but this model's is")),
        ({"tokenizer": "cd" * 32}, ("tokenizer with fingerprint cdcdcdcdcdcd", "but this model's is")),
    ],
)
def test_heads_of_another_model(tmp_path: Path, heads: Path, changes: dict[str, Any], said: tuple[str, ...]) -> None:
    describe(heads, **changes)
    with pytest.raises(ExportError) as caught:
        load_source(options(tmp_path, heads))
    assert all(part in str(caught.value) for part in said)
    assert not (tmp_path / "bundle").exists()


def test_heads_of_another_hidden_size(tmp_path: Path) -> None:
    folder = make_heads(tmp_path / "small", "medusa", "builtin:shakespeare-draft")
    with pytest.raises(ExportError, match="hidden size 64, but this model's is 128"):
        load_source(options(tmp_path, folder))


def test_heads_of_this_model(tmp_path: Path, heads: Path) -> None:
    arch = open_model(resolve(TARGET), None)
    describe(
        heads,
        model=model_fingerprint(arch.source, arch.final_norm.weight, arch.embedding),
        tokenizer=tokenizer_fingerprint(TextCodec(arch.source.path)),
    )
    assert load_source(options(tmp_path, heads)).models.heads.plan is not None


def test_an_exit_beyond_the_layers(tmp_path: Path) -> None:
    folder = make_heads(tmp_path / "exits", "paradecode", TARGET)
    tensors = load_file(folder / TENSORS)
    tensors["exit.6.weight"] = tensors.pop("exit.5.weight")
    save_file(tensors, folder / TENSORS)
    describe(folder, exits=[3, 6])
    with pytest.raises(ExportError, match="an exit after layer 6, but this model has 6 layers"):
        load_source(options(tmp_path, folder, "paradecode"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ["self-spec"]}, "holds medusa heads, but not --method medusa"),
        ({"heads": ()}, "method medusa needs trained heads"),
        (
            {"methods": ["self-spec"], "heads": (), "head_vocab": 100},
            "--head-vocab was given, but no method with heads",
        ),
        ({"methods": ["self-spec"], "heads": (), "draft_vocab": 9}, "--draft-vocab was given, but no method"),
        ({"head_vocab": 1}, "--head-vocab 1: expected 2 to 1024"),
        ({"head_vocab": 2000}, "--head-vocab 2000: expected 2 to 1024"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, heads: Path, changes: dict[str, Any], said: str) -> None:
    source = tmp_path / "model"
    shutil.copytree(resolve(TARGET), source)
    whole: dict[str, Any] = {
        "model": str(source),
        "output": tmp_path / "b",
        "methods": ["medusa"],
        "heads": (str(heads),),
    } | changes
    with pytest.raises(ExportError) as caught:
        load_source(ExportOptions(**whole))
    assert said in str(caught.value)


def test_two_of_a_kind(tmp_path: Path, heads: Path) -> None:
    with pytest.raises(ExportError, match="the second medusa heads"):
        load_source(ExportOptions(TARGET, tmp_path / "b", methods=["medusa"], heads=[str(heads), str(heads)]))


# -- cut vocabularies --------------------------------------------------------------------------------------------------


def test_frequent_tokens() -> None:
    got = frequent_tokens([9, 9, 9, 4, 4, 7], 4, 12, [11], "--head-vocab")
    assert got.tolist() == [4, 7, 9, 11]
    assert frequent_tokens([9], 5, 12, [], "--head-vocab").tolist() == [0, 1, 2, 3, 9]


def test_chosen_rows() -> None:
    source = open_model(resolve(TARGET), None).source
    name, ids = "model.embed_tokens.weight", np.array([3, 700, 1023])
    whole = source.read(name)
    cut = ExtendedCheckpoint(source, {"cut": chosen_rows(source, name, ids, HIDDEN), "held": held(whole[:2])})
    assert cut.shape("cut") == (3, HIDDEN)
    np.testing.assert_array_equal(np.concatenate(list(cut.pieces("cut"))), whole[ids])
    np.testing.assert_array_equal(cut.read("cut", slice(1, 3), slice(0, 5)), whole[ids[1:], :5])
    np.testing.assert_array_equal(cut.read("held"), whole[:2])
    assert cut.has("held")
    assert "held" not in cut.index
    np.testing.assert_array_equal(cut.read(name), whole)


# -- exporting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_vocab", [None, 300])
def test_export_and_run(tmp_path: Path, head_vocab: int | None) -> None:
    folders = [make_heads(tmp_path / kind, kind, TARGET) for kind in KINDS]
    manifest = export_model(
        ExportOptions(
            TARGET,
            tmp_path / "bundle",
            methods=KINDS,
            heads=[str(folder) for folder in folders],
            head_vocab=head_vocab,
            threads=2,
        ),
        golden=False,
    )
    assert [group.name for group in manifest.target.heads] == ["medusa", "blockwise", "exit.3", "exit.5"]
    assert (manifest.target.head_vocab is None) == (head_vocab is None)
    assert manifest.methods["medusa"].heads == ["medusa"]
    assert len(manifest.methods["medusa"].ranks) == 3
    assert manifest.methods["paradecode"].threshold is not None
    if head_vocab:
        assert manifest.target.head_vocab is not None
        tokens = np.fromfile(tmp_path / "bundle" / manifest.target.head_vocab.file, "<i4")
        assert len(tokens) == head_vocab
        assert (np.diff(tokens) > 0).all()
    for operators in ("stock", "auto"):
        engine = load(tmp_path / "bundle", threads=2, operators=operators)
        for prompt in PROMPTS[:3]:
            plain = engine.generate(prompt, method="ar", max_new_tokens=40, ignore_eos=True)
            for kind in KINDS:
                result = engine.generate(prompt, method=kind, max_new_tokens=40, ignore_eos=True, fallback=False)
                assert result.tokens == plain.tokens
                assert result.stats.dropped_reason is None
                assert result.stats.drafted > 0


def test_a_draft_with_a_cut_vocabulary(tmp_path: Path) -> None:
    made = export_model(
        ExportOptions(
            TARGET,
            tmp_path / "bundle",
            methods=["speculative"],
            draft="builtin:shakespeare-draft",
            draft_vocab=256,
            threads=2,
        ),
        golden=False,
    )
    assert made.draft is not None
    assert made.draft.cut
    assert made.draft.head_vocab is not None
    assert made.draft.head_vocab.size == 256
    engine = load(tmp_path / "bundle", threads=2)
    plain = engine.generate("ROMEO:", method="ar", max_new_tokens=80)
    result = engine.generate("ROMEO:", method="speculative", max_new_tokens=80, fallback=False)
    assert result.tokens == plain.tokens
    assert result.stats.accepted > 0


@pytest.mark.parametrize("operators", ["native", "stock"], indirect=True)
def test_a_cut_head_keeps_its_biases(checkpoint: Callable[[str], Path], tmp_path: Path, operators: Operators) -> None:
    source = str(checkpoint("phi_half"))  # the draft is the model: its guesses are right unless something is lost
    bundle = tmp_path / "bundle"
    export_model(ExportOptions(source, bundle, ["speculative"], draft=source, draft_vocab=160, threads=2), golden=False)
    engine = load(bundle, threads=2, operators=operators)
    made = engine.generate("The harbour", method="speculative", max_new_tokens=60, ignore_eos=True, fallback=False)
    assert made.stats.accepted > 0.9 * made.stats.drafted


def test_the_description_is_pinned() -> None:
    """Heads trained with this version are read by the next one."""
    assert set(HeadsFile.model_fields) == {
        "schema_version", "kind", "count", "hidden", "vocab", "model", "tokenizer", "inner", "exits", "own", "ranks",
        "training",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["F8_E4M3", "I8", "BOOL"])
def test_tensors_that_are_no_plain_floats(tmp_path: Path, kind: str) -> None:
    header = json.dumps({"0.0.linear.weight": {"dtype": kind, "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "medusa_lm_head.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ExportError, match=f"0.0.linear.weight is of type {kind}, expected one of F16"):
        read_heads(tmp_path)


TOKENS = np.array([0, 1, 5, 17, 40, 41, 99, 149])
TEXT = np.array([3, 90, 14, 77, 2, 51])


@pytest.mark.parametrize("layout", ["stock", "native"])
@pytest.mark.parametrize("name", ["phi_half", "phi_gqa", "llama_tied_gqa"])
def test_a_cut_head_has_the_rows_and_the_biases(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, layout: Layout, request: pytest.FixtureRequest
) -> None:
    if layout == "native":
        request.getfixturevalue("native")
    whole = open_model(checkpoint(name), None)
    expected = reference_logits(whole, TEXT.tolist(), list(range(len(TEXT))))[:, TOKENS]
    assert (whole.head.bias is not None) == name.startswith("phi")
    if whole.head.bias is not None:
        assert np.abs(whole.source.read(whole.head.bias)[TOKENS]).max() > 0.01  # else this would show nothing

    draft = open_model(checkpoint(name), None)
    plan, vocab = cut_draft(draft, TOKENS), head_vocab("", TOKENS)
    write_tokens(tmp_path, TOKENS)
    part = write_model(tmp_path, draft, ModelSpec("fp32", draft=True, layout=layout, plan=plan, head_vocab=vocab)).part
    graph = "plain" if layout == "stock" else "native"
    slot = open_slot(Model(tmp_path, part, graph, 1, ATTENTION["f32"]))
    np.testing.assert_allclose(slot.forward(TEXT).logits, expected, rtol=0, atol=2e-4)

    target, last = open_model(checkpoint(name), None), whole.facts.layers
    same = held(np.eye(target.facts.hidden, dtype=np.float32))  # an exit after all layers that changes nothing
    file = HeadsFile(kind="paradecode", count=1, hidden=target.facts.hidden, vocab=0, exits=[last])
    heads = HeadChoice({"paradecode": TrainedHeads(file, {f"exit.{last}.weight": same})}, TOKENS)
    heads.extend(target)
    spec = ModelSpec("fp32", gated=True, layout=layout, plan=heads.plan, head_vocab=vocab)
    part = write_model(tmp_path, target, spec).part
    slot = open_slot(Model(tmp_path, part, "gated" if layout == "stock" else "native", 1, ATTENTION["f32"]))
    hidden = states(slot, TEXT).hidden
    assert hidden is not None
    got = run_heads(slot, f"exit.{last}", hidden.copy()).logits
    assert got is not None
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=2e-4)
