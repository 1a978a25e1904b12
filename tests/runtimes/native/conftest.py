"""Bundles that Python's loop and the C interface's open side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import Format
from tests.conftest import DRAFT, TARGET, fixed_skip_set, method_parts
from tests.support.alone import alone, common
from tests.support.both_loops import Both
from tests.support.dflash import write_dflash
from tests.support.mtp import write_mtp

DRAFTERS = {"eagle": "eagle", "qwen3_tied": "mtp", "qwen3_5_delta": "mtp", "dflash": "dflash"}
"""Names of bundles with a drafter over hidden states -> its method."""


def export_drafter(folder: Path, name: str) -> Path:
    """Make a bundle with such a drafter, and with all other methods that its target can have."""
    kind, source, drafter, draft = DRAFTERS[name], TARGET, None, DRAFT
    if kind == "eagle":
        methods, _ = method_parts(TARGET)
    else:
        model = write_mtp(folder / "model", "qwen3_tied" if kind == "dflash" else name, agrees=True)
        source = draft = str(model)
        methods = ["speculative", "self-spec"]
        if kind == "dflash":
            drafter = str(write_dflash(folder / "drafter", open_model(model, None), agrees=True))
    options = ExportOptions(source, folder / "bundle", [*methods, kind], "int4", threads=1, operators="native",
                            draft=draft, drafter=drafter, skip_set=fixed_skip_set(folder, source))  # fmt: skip
    export_model(options, golden=False)
    return options.output


@pytest.fixture(scope="module")
def both(
    bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, native: None
) -> Iterator[Callable[[str], Both]]:
    """Open a bundle of ``DRAFTERS``, or that of the embedded model in a format, on both sides, once."""
    made: dict[str, Both] = {}

    def path_of(name: str) -> Path:
        if name in get_args(Format):
            return bundles("native", name)
        folder = common(tmp_path_factory) / f"drafter-{name}"
        folder.mkdir(exist_ok=True)
        with alone(folder / "lock"):
            return folder / "bundle" if (folder / "bundle").exists() else export_drafter(folder, name)

    def get(name: str) -> Both:
        if name not in made:
            made[name] = Both.open(path_of(name))
        return made[name]

    yield get
    for one in made.values():
        one.close()
