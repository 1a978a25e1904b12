"""The table of keys is complete: every key that a model's files can have is listed, with the right treatment."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from edgespec.export import architectures
from edgespec.export.architectures import ARCHITECTURES, TEXT_HALVES, rope
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.sights import READ
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.source.keys import CONFIG, GGUF, KEYS, QUANTIZATION, TOKENIZER, fate_of, left_out, unread
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.tokenizers.facts import GENERATION
from edgespec.runtimes.text.codec import TextCodec
from tests.support.gguf_files import write_gguf

KINDS = sorted({*ARCHITECTURES, *TEXT_HALVES, *(kind for kinds in READ.values() for kind in kinds)})
SIDES = ("encoder", "decoder", "source", "target")
SETTINGS = ("get", "integer", "optional", "each", "layers", "number", "positive", "flag", "activation", "refuse")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", "5.24", reason="needs transformers")


def attributes(config: Any) -> Iterator[str]:
    """Give the keys that a configuration of transformers writes, and those of its parts."""
    yield from {field.name for field in dataclasses.fields(config)} | {*config.to_dict()}
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from attributes(value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_configuration_has_a_fate(transformers: Any, kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no configuration of it")
    given = {key for key in attributes(transformers.CONFIG_MAPPING[kind]()) if key == key.lstrip("_")}
    assert sorted(given - KEYS[CONFIG].keys()) == []


def words(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def known_to(kind: type[Architecture]) -> set[str]:
    """Return the strings in code that reads an architecture's configuration: its classes and related functions."""
    made = [part for part in (kind.states, kind.experts) if part is not None]
    parts = [type(part) for part in made]
    found = words(ast.parse(inspect.getsource(rope)))
    found |= {
        word
        for part in made
        for value in vars(part).values()
        if isinstance(value, tuple)
        for word in value
        if isinstance(word, str)
    }
    for each in {base for one in (kind, *parts) for base in one.__mro__[:-1]}:
        found |= words(ast.parse(textwrap.dedent(inspect.getsource(each))))
        beside = ast.parse(inspect.getsource(sys.modules[each.__module__])).body
        found |= {word for node in beside if not isinstance(node, ast.ClassDef) for word in words(node)}
    found |= {f"linear_{word}" for word in found}  # of delta rules
    return found | {word.format(side) for word in found if word.count("{}") == 1 for side in SIDES}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_what_is_applied_is_read_by_that_architecture(transformers: Any, kind: str) -> None:
    """A key that one architecture applies must not be ignored by another one that has it."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no configuration of it")
    config = transformers.CONFIG_MAPPING[kind]()
    given = {field.name for field in dataclasses.fields(config)} | {*config.to_dict()}
    rows = {key: known for key in given if (known := fate_of(CONFIG, key, kind))}
    asked = {key for key, known in rows.items() if known.fate == "refused" or "architectures/base.py" in known.why}
    assert sorted(asked - known_to(ARCHITECTURES[kind])) == []


def test_keys_that_the_code_reads_are_in_the_table() -> None:
    """Else an export would name them as not read."""
    found = set()
    for file in Path(architectures.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SETTINGS):
                continue
            if ast.unparse(node.func.value).endswith(("settings", "config")) and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    names = [alias for kind in ARCHITECTURES.values() for alias in kind.aliases.values() if "{" not in alias]
    assert len(found) > 40
    assert sorted({*found, *names} - {""} - KEYS[CONFIG].keys()) == []


def test_every_key_of_generation_config(transformers: Any) -> None:
    given = {key for key in vars(transformers.GenerationConfig()) if not key.startswith("_")}
    assert sorted(given - KEYS[GENERATION].keys()) == []


def test_every_key_of_quantization(transformers: Any) -> None:
    """The keys are those of methods that are converted; others are refused by name."""
    from transformers.utils import quantization_config as known

    kinds = (known.GPTQConfig, known.AwqConfig, known.FbgemmFp8Config, known.FineGrainedFP8Config,
             known.CompressedTensorsConfig)  # fmt: skip
    given = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}
    assert sorted(given - KEYS[QUANTIZATION].keys()) == []


def test_every_key_of_tokenizers(transformers: Any) -> None:
    """The keys are those of published tokenizers in tests/data, and of transformers' own classes."""
    base = transformers.PreTrainedTokenizerBase
    tree = ast.parse(textwrap.dedent(inspect.getsource(base.__init__)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.pop"]
    given = {str(node.args[0].value) for node in calls if isinstance(node.args[0], ast.Constant)}
    given |= {*base.SPECIAL_TOKENS_ATTRIBUTES, "add_bos_token", "add_eos_token"}
    for file in Path(__file__).parents[2].joinpath("data").rglob("tokenizer_config.json"):
        given |= {*json.loads(file.read_text("utf-8"))}
    assert len(given) > 20
    assert sorted(key for key in given - KEYS[TOKENIZER].keys() if not key.startswith("_")) == []


def keys_of(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value


def test_every_key_of_gguf() -> None:
    """Those of llama.cpp's writer; a projector's are refused with the file."""
    given = {key.replace("{arch}", "llama") for key in keys_of(gguf.Keys) if not key.startswith("clip.")}
    named = {key for key in given if "{" not in key}
    assert len(named) > 150
    assert sorted(key for key in named if fate_of(GGUF, key, "llama") is None) == []


def test_no_key_is_named_twice() -> None:
    """Reading the table asserts it; here that the fates are spread."""
    assert {known.fate for table in KEYS.values() for known in table.values()} == {
        "applied",
        "refused",
        "left out",
        "nothing",
    }


# -- notes of an export -----------------------------------------------------------------------------------------------


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    given = {"typical_p": 0.9, "epsilon_cutoff": 0.0, "sequence_bias": [[[3], -1.0]], "temperature": 0.7, "unheard": 3}
    assert list(unread(GENERATION, given)) == [
        f"{GENERATION}: not read: sequence_bias, typical_p (no sampling here does it)",
        f"{GENERATION}: not read: unheard (edgespec does not know them)",
    ]
    assert list(unread(GENERATION, {"typical_p": 1.0, "max_length": 20, "num_beams": 1, "stop_strings": None})) == []
    assert list(unread(CONFIG, {"hidden_size": 8, "_hidden": 3, "swiglu_step": 7.0})) == [
        f"{CONFIG}: not read: swiglu_step (edgespec does not know them)"
    ]
    codec = TextCodec(resolve("builtin:shakespeare-draft"))
    (tmp_path / TOKENIZER).write_text(json.dumps({"clean_up_tokenization_spaces": True}), "utf-8")
    (tmp_path / GENERATION).write_text(json.dumps({"max_length": 512, "num_beams": 4}), "utf-8")
    assert left_out(tmp_path, {}, codec, sequence=True) == []
    assert [word.split(":")[0] for word in left_out(tmp_path, {}, codec, sequence=False)] == [GENERATION, GENERATION]


@pytest.mark.parametrize(
    "pipeline, adds",
    [({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, True),
     ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}, False),
     ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(True)])}, True),
     ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")}, True),
     ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never")}, False),
     ({"normalizer": normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])}, True),
     ({"normalizer": normalizers.NFC()}, False)],
)  # fmt: skip
def test_a_space_before_a_text_that_tokenizer_json_does_not_add(
    tmp_path: Path, pipeline: dict[str, Any], adds: bool
) -> None:
    """transformers changes some tokenizers by this key, and here only tokenizer.json decides."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    for name, part in pipeline.items():
        setattr(made, name, part)
    made.save(str(tmp_path / "tokenizer.json"))
    for value, named in ((adds, False), (not adds, True), (None, False)):
        (tmp_path / TOKENIZER).write_text(json.dumps({"add_prefix_space": value}), "utf-8")
        found = left_out(tmp_path, {}, TextCodec(tmp_path), sequence=False)
        assert [word for word in found if "add_prefix_space" in word] == [
            f"{TOKENIZER}: not read: add_prefix_space (tokenizer.json decides, and says {adds})"
        ] * named


def test_an_export_names_them(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(resolve("builtin:shakespeare-draft"), source)
    for name, more in ((GENERATION, {"sequence_bias": [[[3], -1.0]]}), (CONFIG, {"unheard": 1})):
        told = json.loads((source / name).read_text("utf-8"))
        (source / name).write_text(json.dumps(told | more), "utf-8")
    notes = load_source(ExportOptions(str(source), tmp_path / "bundle", ["ar"], "fp32")).notes
    assert any("sequence_bias" in note for note in notes)
    assert any("unheard" in note for note in notes)
    plain = load_source(ExportOptions("builtin:shakespeare-draft", tmp_path / "bundle", ["ar"], "fp32")).notes
    assert not any("not read" in note for note in plain)


def test_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(64)
        writer.add_float32("llama.attention.unheard", 2.0)
        writer.add_string("general.license", "apache-2.0")
        writer.add_float32("general.sampling.xtc_probability", 0.5)

    write_gguf(tmp_path / "model.gguf", "llama_tied_gqa", change=change)
    notes = " ".join(Checkpoint.open(tmp_path / "model.gguf").notes)
    assert "llama.attention.sliding_window (as llama.cpp does" in notes
    assert "llama.attention.unheard (edgespec" in notes
    assert "xtc_probability" in notes
    assert "license" not in notes
