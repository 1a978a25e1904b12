"""The Kotlin runtime on a JVM with real ONNX Runtime: its own tests, and token for token what Python writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec import load
from edgespec.runtimes.files.manifest import FORMATS
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import PROMPTS, THREADS
from tests.support import golden
from tests.support.jvm import need_maven, run_tests, same_onnxruntime

LENGTH = 32
CHOSEN = (0, 4, 10, 13)  # prompts
METHODS = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode", "auto")
FIXED = ("ar", "ngram", "self-spec", "blockwise", "paradecode")  # the clock does not choose between chains and trees
TREE = {"method": "speculative", "branch": [2]}
CHAIN = {"method": "chain", "proposers": ["ngram", "self-spec"]}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


class LastToken:
    """Guesses that the last token comes again; the Kotlin test has its twin."""

    def propose(self, tokens: list[int], budget: int) -> list[int]:
        return [tokens[-1]] * min(budget, 3)


def ways() -> list[dict[str, Any]]:
    """Settings that are compared: every method, greedy and sampled; some shapes of guesses and ways to verify."""
    found: list[dict[str, Any]] = [{"method": name, **how} for name in METHODS for how in ({}, SEEDED)]
    found += [{**shape, **how} for shape in (TREE, CHAIN, {"method": "proposer"}) for how in ({}, SEEDED)]
    found += [
        {"method": "speculative", **SEEDED, **how} for how in ({"verification": "block"}, {"acceptance": "coupled"})
    ]
    found.append(
        {"method": "ngram", "temperature": 0.8, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 3}
    )
    found.append({"method": "blockwise", "cycles": 2})
    return found


def write_golden(bundles: Callable[..., Path], path: Path) -> int:
    """What Python writes on fresh exports, for the Kotlin test; returns the number of tokens."""
    made, total = [], 0
    for operators in ("native", "stock"):
        for form in FORMATS:
            bundle = bundles(operators, form)
            engine = load(bundle, threads=THREADS, operators=operators)
            cases = []
            for number, settings in enumerate(ways()):
                prompt = engine.codec.encode(PROMPTS[CHOSEN[number % len(CHOSEN)]])
                changes = {name: value for name, value in settings.items() if name not in ("method", "proposers")}
                changes |= {"proposers": tuple(settings["proposers"])} if "proposers" in settings else {}
                own = settings["method"] == "proposer"
                changes |= {"proposer": LastToken()} if own else {"method": settings["method"]}
                result = engine.generate(prompt, max_new_tokens=LENGTH, ignore_eos=True, **changes)
                assert result.stats.dropped_reason is None
                total += len(result.tokens)
                exact = result.exact and settings["method"] in FIXED
                cases.append({"prompt": prompt, "settings": settings, "max_new_tokens": LENGTH, "tokens": result.tokens,
                              "text": result.text, "exact": exact})  # fmt: skip
            made.append({"path": str(bundle), "operators": operators, "format": form, "cases": cases})
            engine.close()
    library = native_library().path
    more = {
        "chats": golden.chats(),
        "tokenizers": golden.tokenizers(path.parent),
        "conversation": golden.conversation(bundles("native", "int4"), path.parent),
    }
    path.write_text(json.dumps({"library": str(library), "bundles": made, **more}), "utf-8")
    return total


@pytest.mark.usefixtures("native")
def test_every_method_writes_what_python_writes(bundles: Callable[..., Path], tmp_path: Path) -> None:
    need_maven()
    path = tmp_path / "golden.json"
    assert write_golden(bundles, path) == len(ways()) * LENGTH * 2 * len(FORMATS)
    ran = run_tests(golden=str(path), onnxruntime=str(same_onnxruntime(tmp_path)))
    assert ran.tests >= 20, ran.output
    assert ran.skipped == 0, ran.output
