"""A drafter is measured on text that the target writes, and one near chance is refused with what would help."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.measuring.diagnose import FORMATS, HELPS, ROWS, Reading, Trials
from edgespec.export.measuring.guesses import LEAST
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Manifest

IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = "builtin:shakespeare"

Tensors = dict[str, np.ndarray]


def exported(folder: Path, config: dict[str, Any], change: Callable[[Tensors], None] | None = None) -> Manifest:
    """Export the embedded model with its drafter, its settings updated by ``config``, its tensors by ``change``."""
    source = resolve(f"{TARGET}-eagle")
    said, tensors = json.loads((source / "config.json").read_text("utf-8")), load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(said | config), "utf-8")
    save_file(tensors, folder / "drafter" / "model.safetensors")
    options = ExportOptions(TARGET, folder / "bundle", ["eagle"], drafter=str(folder / "drafter"), threads=1)
    return export_model(options, golden=False)


def swapped(tensors: Tensors) -> None:
    """Trained with the hidden state before the embedding."""
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = np.roll(tensors[name], tensors[name].shape[1] // 2, 1)


def other(tensors: Tensors) -> None:
    """Make it a drafter of another model."""
    for name, values in tensors.items():
        tensors[name] = np.ascontiguousarray(values[::-1])


@pytest.mark.parametrize(
    "change, hint", [(swapped, "hidden state before the embedding"), (other, "may be for another model")]
)
def test_a_drafter_near_chance_is_refused(tmp_path: Path, change: Callable[[Tensors], None], hint: str) -> None:
    with pytest.raises(ExportError, match="of the drafter's first guesses") as refused:
        exported(tmp_path, {}, change)
    assert hint in str(refused.value.hint)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("said", [[0, 2, 4], [5, 3, 1]])
def test_a_setting_that_would_be_better_is_said(tmp_path: Path, said: list[int]) -> None:
    """Layers counted from another end, and in another order."""
    notes = exported(tmp_path, {IDS: said}).methods["eagle"].notes
    assert notes is not None
    assert f"{IDS}: [1, 3, 5]" in notes


def test_the_share_of_the_models_tokens_that_it_can_guess_is_said(tmp_path: Path) -> None:
    kept = np.arange(0, 1024, 2)

    def cut(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][kept])
        tensors["d2t"] = kept - np.arange(len(kept))

    notes = exported(tmp_path, {}, cut).methods["eagle"].notes
    assert notes is not None
    found = re.search(r"can guess 512 tokens, (\d+)% of those that the model wrote", notes)
    assert found is not None
    assert 10 < int(found[1]) < 90


def test_first_guesses_are_compared_in_every_format(tmp_path: Path) -> None:
    """The written format has the acceptance of the manifest; eight bits draft as the source does, noise does not."""
    found = exported(tmp_path, {}).methods["eagle"]
    said = re.search(r"by format, as written first: int4 (\d+)%, fp32 (\d+)%, int8 (\d+)%", found.notes or "")
    assert said is not None
    written, whole, eight = map(int, said.groups())
    assert abs(written - 100 * found.measured[0].acceptance[0]) <= 1
    assert abs(whole - eight) <= 10 < 20 <= whole


Written = tuple[Format, Format | None]  # a format, and the LM head's where it was asked for


@dataclass(frozen=True)
class MadeUp(Trials):
    """Trials whose shares are given, of each format or of each reading in float32.

    Attributes:
        shares: by a format, or by words.
        seen: what was written, with the words and the settings of the architecture at that moment.
    """

    shares: dict[Any, float] = field(default_factory=dict)
    seen: list[tuple[Written, list[str], dict[str, Any]]] = field(default_factory=list)

    def _written(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        key: Written = (choice.stored, choice.asked)
        self.seen.append((key, [each.words for each in readings], dict(vars(self.drafter.arch))))
        if -1 in self.shares:
            raise RuntimeError("it cannot be written")
        return {each.words: self.shares[each.words] if each.words else self.shares[key] for each in readings}


def trials(choice: WeightChoice, shares: dict[Any, float], **arch: Any) -> MadeUp:
    drafter: Any = SimpleNamespace(arch=SimpleNamespace(**arch), spec=SimpleNamespace(target=None), tapped=(1, 2))
    target: Any = SimpleNamespace(layers=4)
    return MadeUp(drafter, choice, Path(), target, [], shares)


def of(form: Format, head: Format | None = None, quantizer: str | None = None) -> WeightChoice:
    return WeightChoice.of(form, quantizer, head)


@pytest.mark.parametrize("form", ["int4", "int8", "fp32", "w8a8"])
def test_other_formats_are_tried_under_the_same_options(form: Format) -> None:
    blocks = form not in ("fp32", "w8a8")
    made = trials(of(form, "int8" if blocks else None, "rtn" if blocks else None), {})
    head: Format | None = "int8" if blocks else None
    made.shares.update({("fp32", None): 0.5, ("int8", head): 0.4, ("int4", head): 0.3})
    by_format = {"fp32": 0.5, "int8": 0.4, "int4": 0.3}
    assert made.formats() == {each: by_format[each] for each in FORMATS if each != form}
    assert len(made.seen) == len(made.formats())
    chosen = made._in("int8").quantizer
    assert chosen is not None
    assert chosen.name == ("rtn" if blocks else "mse")  # the requested one, or by default mse


@pytest.mark.parametrize(
    "choice, known, shares, expected",
    [
        # nothing is better
        (of("int4"), 0.3, {("fp32", None): 0.3}, ""),
        (of("int4"), 0.1, {("fp32", None): 0.14}, ""),
        # better, and still near chance
        (of("int4"), 0.1, {("fp32", None): 0.19}, ""),
        # in eight bits, else in float32
        (of("int4"), 0.1, {("fp32", None): 0.4, ("int8", None): 0.3},
         "30% would be right with --format int8, 40% in fp32: it is the format that costs them"),
        (of("int4"), 0.1, {("fp32", None): 0.4, ("int8", None): 0.19},
         "40% would be right with --format fp32: it is the format that costs them"),
        (of("int4"), 0.3, {("fp32", None): 0.4, ("int8", None): 0.34},
         "40% would be right with --format fp32: it is the format that costs them"),
        (of("int8"), 0.1, {("fp32", None): 0.4},
         "40% would be right with --format fp32: it is the format that costs them"),
        (of("fp32"), 0.1, {("fp32", None): 0.4}, ""),
        # as much as is needed
        (of("int8"), 0.1, {("fp32", None): LEAST},
         "20% would be right with --format fp32: it is the format that costs them"),
        (of("int4"), 0.1, {("fp32", None): 0.4, ("int8", None): LEAST},
         "20% would be right with --format int8, 40% in fp32: it is the format that costs them"),
        # a head of four bits first: it is the smaller change
        (of("int4", "int4"), 0.1, {("fp32", None): 0.4, ("int4", "int8"): 0.25, ("int8", "int4"): 0.3},
         "25% would be right with --head-format int8, 40% in fp32: it is the format that costs them"),
        (of("int4", "int4"), 0.1, {("fp32", None): 0.4, ("int4", "int8"): 0.1, ("int8", "int4"): 0.3},
         "30% would be right with --format int8, 40% in fp32: it is the format that costs them"),
        (of("int8", "int4"), 0.1, {("fp32", None): 0.4, ("int8", "int8"): 0.3},
         "30% would be right with --head-format int8, 40% in fp32: it is the format that costs them"),
    ],
)  # fmt: skip
def test_the_smallest_format_that_helps_is_said(
    choice: WeightChoice, known: float, shares: dict[Any, float], expected: str
) -> None:
    assert trials(choice, shares).hint(known) == expected


@pytest.mark.parametrize(
    "base, others, expected",
    [
        (0.1, {}, ""),
        (0.1, {"one": 0.14}, ""),
        (0.1, {"one": 0.1 + HELPS}, "15% would be right with one"),
        (0.1, {"one": 0.16, "two": 0.12}, "16% would be right with one"),
        (0.1, {"one": 0.5, "two": 0.6}, "60% would be right with two"),
        (0.3, {"one": 0.34}, "30% would be right with --format fp32: it is the format that costs them"),
        (0.3, {"one": 0.4}, "40% would be right with one; 30% would be right with --format fp32: "
                            "it is the format that costs them"),
    ],
)  # fmt: skip
def test_the_best_reading_is_said_where_it_helps(
    monkeypatch: pytest.MonkeyPatch, base: float, others: dict[str, float], expected: str
) -> None:
    """All readings, including the current one, are compared in float32, with settings that do not persist."""
    readings = [Reading(words, (1, 2), {"raw": words == "two"}) for words in others]
    monkeypatch.setattr("edgespec.export.measuring.diagnose.other_readings", lambda *_: readings)
    made = trials(of("int8"), {("fp32", None): base, **others}, raw=False, kept=3)
    assert made.hint(0.1) == expected
    first = [("fp32", None), ["", *(words for words in others if words != "two")], False]
    second = [("fp32", None), ["two"], True]
    seen = [[key, words, arch["raw"]] for key, words, arch in made.seen]
    assert seen[: 1 + ("two" in others)] == [first, second][: 1 + ("two" in others)]
    assert vars(made.drafter.arch) == {"raw": False, "kept": 3}


def test_settings_do_not_stay_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [Reading("other", (1, 2), {"raw": True})]
    monkeypatch.setattr("edgespec.export.measuring.diagnose.other_readings", lambda *_: readings)
    made = trials(of("int8"), {-1: 0}, raw=False)
    with pytest.raises(RuntimeError):
        made._shares(of("fp32"), readings)
    assert made.seen[0][2]["raw"] is True
    assert vars(made.drafter.arch) == {"raw": False}


def test_the_scale_of_embeddings_is_that_of_some_rows() -> None:
    stored = 0.01 * np.random.default_rng(0).standard_normal((99, 8)).astype(np.float32)
    made = trials(of("int8"), {})
    assert made._scale() == 1.0
    target: Any = SimpleNamespace(embed=lambda ids: 5 * stored[ids])
    source = SimpleNamespace(read=lambda name, rows: stored[rows] if (name, rows) == ("e", slice(0, ROWS)) else None)
    spec: Any = SimpleNamespace(target=SimpleNamespace(source=source, embedding="e"))
    other = MadeUp(SimpleNamespace(spec=spec, tapped=()), of("int8"), Path(), target, [])  # type: ignore[arg-type]
    assert other._scale() == pytest.approx(5)
    source.read = lambda name, rows: 0 * stored[rows]
    assert np.isfinite(other._scale())
