"""The disturbed commands, which write, and checks that their files are complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.drafters.ngram_stores import NGramStore
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.profiles import read_profile
from edgespec.runtimes.files.json_file import parse_json

TARGET, MODEL = "builtin:shakespeare", "builtin:shakespeare-draft"
PROMPT = "KING RICHARD:\n"


@dataclass(frozen=True)
class Job:
    """A command that writes.

    Attributes:
        arguments: of ``edgespec``, given the folder it works in.
        look: raises where what it left is not whole; what has not been made yet is whole.
        made: whether all of its files exist.
        alone: whether a second one at the same time is refused.
    """

    arguments: Callable[[Path], list[str]]
    look: Callable[[Path], None]
    made: Callable[[Path], bool]
    alone: bool = False


def prepare(folder: Path) -> None:
    """Say what the jobs read: a bundle with native weights and texts."""
    options = ExportOptions(
        TARGET, folder / "bundle", ["self-spec", "swift"], "int4", threads=1, operators="native", trials=1
    )
    export_model(options, golden=False)
    (folder / "texts.txt").write_text("".join(f"the king said {n} and {n + 1} words\n" for n in range(400)), "utf-8")


def text_of(bundle: Path) -> list[int]:
    """Tokens that a bundle writes; every file of it is compared with its hash first."""
    with load(bundle, threads=1, budget="off", operators="native") as engine:
        return engine.generate(PROMPT, method="ar", max_new_tokens=4, ignore_eos=True).tokens


def _look_at_bundle(work: Path) -> None:
    out = work / "out" / "bundle"
    if out.exists() and len(text_of(out)) != 4:
        raise AssertionError("a bundle that writes nothing")


def _look_at_conversion(work: Path) -> None:
    for folder in (work / "cache").glob("[!.]*-stock"):
        with load(work / "bundle", threads=1, budget="off", operators="stock") as engine:
            written = engine.generate(PROMPT, method="ar", max_new_tokens=4, ignore_eos=True).tokens
        if len(written) != 4:
            raise AssertionError(f"{folder.name}: weights that write nothing")


def _look_at_profiles(work: Path) -> None:
    for file in (work / "cache" / "profiles").glob("[!.]*"):
        read_profile(file)


def _look_at_sets(work: Path) -> None:
    for file in (work / "cache" / "skip-sets").glob("[!.]*"):
        parse_json(file.read_bytes())


def _look_at_store(work: Path) -> None:
    if (file := work / "out" / "texts.store").exists():
        NGramStore(file, check=True)


def _look_at_heads(work: Path) -> None:
    if (folder := work / "out" / "heads" / "edgespec_heads.json").exists():
        json.loads(folder.read_text("utf-8"))


EXPORT = ["export", MODEL, "--threads", "1", "--quantizer", "rtn"]
TRAIN = ["train", "medusa", MODEL, "--self-distill", "4", "--heads", "1", "--batch", "2", "--length", "16"]
TRAIN += ["--steps", "3", "--held-out", "1", "--new-tokens", "8", "--threads", "1", "--save-every", "1"]
RUN = ["--prompt", PROMPT, "--threads", "1"]

JOBS: dict[str, Job] = {
    "export": Job(
        lambda work: [*EXPORT, "-o", str(work / "out" / "bundle"), "--overwrite"],
        _look_at_bundle,
        lambda work: (work / "out" / "bundle").exists(),
    ),
    "conversion": Job(
        lambda work: ["run", str(work / "bundle"), *RUN, "--operators", "stock", "--max-new-tokens", "2"],
        _look_at_conversion,
        lambda work: any((work / "cache").glob("[!.]*-stock")),
    ),
    "calibrate": Job(
        lambda work: ["calibrate", str(work / "bundle"), "--duration", "0.1", "--threads", "1", "--force"],
        _look_at_profiles,
        lambda work: any((work / "cache" / "profiles").glob("[!.]*")),
    ),
    "train": Job(
        lambda work: [*TRAIN, "-o", str(work / "out" / "heads"), "--overwrite"],
        _look_at_heads,
        lambda work: (work / "out" / "heads" / "edgespec_heads.json").exists(),
        alone=True,
    ),
    "ngram build": Job(
        lambda work: [
            *["ngram", "build", str(work / "texts.txt"), "--tokenizer", str(work / "bundle"), "--overwrite"],
            *["-o", str(work / "out" / "texts.store")],
        ],
        _look_at_store,
        lambda work: (work / "out" / "texts.store").exists(),
    ),
    "skip sets": Job(
        lambda work: [
            *["run", str(work / "bundle"), *RUN, "--method", "swift", "--max-new-tokens", "600"],
        ],
        _look_at_sets,
        lambda work: True,  # a search that finds nothing keeps nothing
    ),
}
