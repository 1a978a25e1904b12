"""Sessions on a JVM against Python: requests that Python serves here, and Kotlin's binding serves again.

    python -m tests.support.agreement --prompts 20 --tokens 100
    python -m tests.support.agreement --prompts 1 --tokens 24 --core cortex-a76 --java FOLDER

Tokens of the second command are written for arm64 under emulation (tests/support/arm64.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import DRAFT, PROMPTS, TARGET, THREADS, fixed_skip_set, method_parts
from tests.support import arm64, jvm
from tests.support.checkpoints import make_heads

METHODS = ("ar", "ngram", "speculative", "self-spec", "medusa", "blockwise", "eagle", "auto")
TREE = {"method": "speculative", "branch": [2]}
CHAIN = {"method": "chain", "proposers": ["ngram", "self-spec"]}
EXPECTED = "I will not be a woman of the state, and the world shall be so. What is the matter, sir?"
# with sampled draft tokens, their number decides the text: no control, which looks at the clock
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "adaptive": False}
# the same text says nothing of a drafter's guesses; these no clock changes: no control, no choice of a tree
COUNTED = ("ngram", "speculative", "self-spec", "medusa", "blockwise", "eagle")
HOSTED = ("ar", "ngram", "speculative")  # what passes of ONNX Runtime can do for the library's loop
UNCONTROLLED = {"adaptive": False, "nodes": 12}


def ways() -> list[dict[str, Any]]:
    """List the settings that are compared: every method, greedy and sampled; some shapes of guesses, ways to verify."""
    found: list[dict[str, Any]] = [{"method": name, **how} for name in METHODS for how in ({}, SEEDED)]
    found.remove({"method": "auto", **SEEDED})  # its choice also belongs to control
    shapes: list[dict[str, Any]] = [TREE, CHAIN]
    counted: list[dict[str, Any]] = [{"method": name} for name in COUNTED]
    found += [{**one, **UNCONTROLLED, **how} for one in [*counted, *shapes] for how in ({}, SEEDED)]
    found += [{**shape, **how} for shape in shapes for how in ({}, SEEDED)]
    found += [
        {"method": "speculative", **SEEDED, **how} for how in ({"verification": "block"}, {"acceptance": "coupled"})
    ]
    found.append(
        {"method": "ngram", "temperature": 0.8, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 3}
    )
    found.append({"method": "blockwise", "cycles": 2})
    found.append({"method": "ngram", "logit_bias": {5: 2.0, 9: -4.0}, "logprobs": True})
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "adaptive": False}
    found += [{"method": "ngram", "prediction": EXPECTED, **penalties, **how} for how in ({}, SEEDED)]
    found += [{**CHAIN, "prediction": EXPECTED, **how} for how in ({}, SEEDED)]
    return found


def serve(
    bundle: Path,
    operators: WantedOperators,
    requests: Sequence[tuple[dict[str, Any], str]],
    length: int,
) -> dict[str, Any]:
    """Give what Python writes for (settings, prompt), for the Kotlin side; every answer has ``length`` tokens."""
    engine = load(bundle, threads=THREADS, operators=operators)
    cases = []
    for settings, text in requests:
        prompt = engine.codec.encode(text)
        changes = {name: value for name, value in settings.items() if name not in ("method", "proposers")}
        changes |= {"proposers": tuple(settings["proposers"])} if "proposers" in settings else {}
        result = engine.generate(prompt, method=settings["method"], max_new_tokens=length, ignore_eos=True, **changes)
        assert result.stats.dropped_reason is None
        assert len(result.tokens) == length
        guesses: dict[str, Any] = {"drafted": result.stats.drafted, "histogram": result.stats.histogram}
        counts = bool(settings.keys() & {"nodes", "presence_penalty"})
        fixed = operators == "native" and "temperature" not in settings  # of stock ones Kotlin compares no rows
        logprobs = {"logprobs": result.logprobs} if "logprobs" in settings else {}
        cases.append({**(guesses if counts else {}), **logprobs, "prompt": prompt, "settings": settings,
                      "max_new_tokens": length, "tokens": result.tokens, "text": result.text,
                      "finish": result.finish, "exact": result.exact and fixed})  # fmt: skip
    form = engine.bundle.manifest.target.format
    engine.close()
    return {"path": str(bundle), "operators": operators, "format": form, "cases": cases}


def export(folder: Path, form: Format, operators: Operators = "native") -> Path:
    """Make a bundle with every method."""
    methods, _ = method_parts(TARGET)
    folder.mkdir()
    options = ExportOptions(TARGET, folder / "bundle", [*methods, "eagle"], form, draft=DRAFT,
                            skip_set=fixed_skip_set(folder, TARGET), threads=THREADS, operators=operators)  # fmt: skip
    export_model(options, golden=False)
    return options.output


def export_random(folder: Path, source: str, operators: Operators = "native") -> Path:
    """Make a bundle of a checkpoint of tests/support/hf.py; the draft is the model itself."""
    folder.mkdir()
    heads = [str(make_heads(folder / "medusa", "medusa", source))]
    methods = ["speculative", "self-spec", "medusa"]
    options = ExportOptions(source, folder / "bundle", methods, "int4", heads=heads, draft=source, threads=THREADS,
                            skip_set=fixed_skip_set(folder, source), operators=operators)  # fmt: skip
    export_model(options, golden=False)
    return options.output


def replay(golden: Path, library: Path, java: Sequence[str] = ("java",)) -> tuple[int, str]:
    """Serve requests of ``serve`` on a JVM -> 0 if nothing differs, and a line for every bundle with its differences.

    The folder of ``golden`` gets the classes.
    """
    classes = jvm.classpath(golden.parent / "built")
    main = ["dev.edgespec.support.ReplayKt", str(golden), str(library)]
    done = subprocess.run([*java, *main], capture_output=True, text=True, env=jvm.environment(classes))
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Compare, print the counts -> 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["fp32", "int8", "int4"])
    parser.add_argument("--core", choices=arm64.CORES, help="run the JVM for arm64, on this emulated core")
    parser.add_argument("--java", type=Path, help="folder of tests/support/arm64.py")
    given = parser.parse_args()
    requests = [(way, prompt) for way in ways() for prompt in PROMPTS[: given.prompts]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = [serve(export(folder / form, form), "native", requests, given.tokens) for form in given.format]
        (folder / "golden.json").write_text(json.dumps({"bundles": made}), "utf-8")
        java, library = ["java"], native_library().path
        assert library is not None, native_library().reason
        if given.core:
            (folder / "root").mkdir()
            java, library = arm64.java(given.java, given.core, folder / "root"), arm64.cross_compile(folder)
        code, said = replay(folder / "golden.json", library, java)
    sys.stdout.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
