"""Python's results on fresh exports, for the Kotlin runtime's tests: ``python -m tests.android.writes FOLDER``.

``mvn verify`` runs it if there are no results yet; ``tests/android/test_kotlin.py`` runs it with its own bundles.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import PROMPTS, THREADS, export_bundle
from tests.support import golden, hf
from tests.support.agreement import HOSTED, SEEDED, export, export_random, serve, ways
from tests.support.dflash import write_dflash
from tests.support.jvm import same_onnxruntime
from tests.support.mtp import write_mtp

LENGTH = 24
CHOSEN = (0, 4, 10, 13)  # prompts
SPREAD = 4  # formats that share the ways; int4 has all of them, and by tests/support/agreement.py all have

# states of convolutions and of delta rules with experts of which some get every row; layers that share keys and values;
# state spaces
KINDS = ("lfm2_conv", "qwen3_5_moe_shared", "gemma4_shared", "granite_hybrid_experts")
STORY = "There was nothing left to do but wait. She had"
# texts that go back: states are read on from where the second left the first, and the fourth the third
BACK = (STORY * 8, STORY * 3 + STORY[::-1] * 3, STORY * 3 + STORY[2:] * 4, STORY * 3 + "?")
# two conversations that alternate, and a third that begins like the first
OTHER = STORY[::-1]
TURNS = (STORY * 5, OTHER * 5, STORY * 5 + OTHER, OTHER * 5 + STORY, STORY * 5 + OTHER * 2, STORY * 4 + OTHER * 2)
RANDOM: tuple[dict[str, Any], ...] = (
    {"method": "ar"}, {"method": "speculative"}, {"method": "speculative", "branch": [2], **SEEDED},
    {"method": "self-spec", **SEEDED}, {"method": "medusa"},
)  # fmt: skip


def write_golden(bundles: Callable[..., Path], checkpoint: Callable[[str], Path], path: Path) -> int:
    """Keep what Python writes on fresh exports, for the Kotlin test; give the number of requests."""
    every = [(settings, PROMPTS[CHOSEN[number % len(CHOSEN)]]) for number, settings in enumerate(ways())]
    common = [request for request in every if request[0]["method"] != "eagle"]
    library = native_library().path
    assert library is not None
    shutil.copy(library, path.parent / "libedgespec.so")  # the app finds it by its name
    full = export(path.parent / "full", "int4")
    made = [serve(full, "native", every, LENGTH)]
    for number, form in enumerate(FORMATS):
        if form != "int4":
            made.append(serve(bundles("native", form), "native", common[number % SPREAD :: SPREAD], LENGTH))
    hosted = [request for request in common if request[0]["method"] in HOSTED]
    made.append(serve(bundles("stock", "int8"), "stock", hosted, LENGTH))
    talks: list[tuple[dict[str, Any], str]] = [({"method": "speculative"}, text) for text in TURNS]
    made.append(serve(bundles("native", "int8"), "native", talks, LENGTH))
    requests: list[tuple[dict[str, Any], str]] = [({"method": "ar"}, text) for text in (*BACK, *TURNS)]
    requests += [(settings, STORY) for settings in RANDOM]
    for name in KINDS:
        made.append(serve(export_random(path.parent / name, str(checkpoint(name))), "native", requests, LENGTH))
    source = write_mtp(path.parent / "mtp", "qwen3_5_delta", agrees=True)
    drafter = write_dflash(path.parent / "dflash", open_model(source, None), (1, 3), agrees=True)
    for method, given in (("mtp", None), ("dflash", str(drafter))):
        options = ExportOptions(str(source), path.parent / f"{method}-bundle", [method], "int8", operators="native",
                                threads=THREADS, drafter=given)  # fmt: skip
        export_model(options, golden=False)
        asked: list[tuple[dict[str, Any], str]] = [({"method": method, **how}, STORY) for how in ({}, SEEDED)]
        made.append(serve(options.output, "native", asked, LENGTH))
    more: dict[str, Any] = {
        "chats": golden.chats(),
        "tokenizers": golden.tokenizers(path.parent),
        "conversation": golden.conversation(full, path.parent),
        "adapters": golden.adapters(full, path.parent),
    }
    path.write_text(json.dumps({"library": str(library), "bundles": made, **more}), "utf-8")
    return sum(len(one["cases"]) for one in made)


def main() -> None:
    """Make everything in a folder, which is new."""
    folder = Path(sys.argv[1]).resolve()
    if native_library().path is None:
        sys.exit(
            f"no native operators: {native_library().reason}; install a C++ compiler, then pip install -e '.[dev]'"
        )
    folder.mkdir(parents=True)
    made: dict[tuple[str, str], Path] = {}

    def bundles(operators: Operators, form: Format = "int4") -> Path:
        if (operators, form) not in made:
            (place := folder / f"{operators}-{form}").mkdir()
            made[operators, form] = export_bundle(place, operators, form)
        return made[operators, form]

    def checkpoint(name: str) -> Path:
        (place := folder / f"{name}-source").mkdir()
        return hf.write_reference_checkpoint(place, name)

    same_onnxruntime(folder)
    write_golden(bundles, checkpoint, folder / "part.json")
    (folder / "part.json").rename(folder / "golden.json")


if __name__ == "__main__":
    main()
