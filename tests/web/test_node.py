"""The npm package in Node: tokens of the native library, and damaged bundles."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.runtimes.files.manifest import MANIFEST
from tests.support.c_sessions import Bundle
from tests.support.c_sessions import settings_of as c_settings
from tests.support.selftest import TESTS, build, host_compiler, host_isas
from tools.build_web import link, objects

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("native")]
HERE = Path(__file__).parent
METHODS = "plain", "ngram", "speculative", "self-spec", "ngram,speculative"
TOKENS = 40


@dataclass(frozen=True)
class Case:
    folder: Path
    isa: str | None
    prompt: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] | None = None

    def written(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "isa": self.isa, "prompt": self.prompt, "settings": self.settings,
                "change": self.change}  # fmt: skip


Run = Callable[[list[Case]], list[Any]]


@pytest.fixture(scope="session")
def run(package: Path, node: str) -> Run:
    """Decode the texts of cases in one process of Node -> what came of each."""

    def go(cases: list[Case]) -> list[Any]:
        asked = json.dumps({"package": str(package), "cases": [case.written() for case in cases]})
        command = [node, str(HERE / "rounds.mjs")]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        found: list[Any] = json.loads(done.stdout)
        return found

    return go


def prompts(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    made = [rng.integers(vocab, size=size).tolist() for size in (1, 7, 30)]
    return [*made, made[1] * 4, made[2] * 20]


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize(("isa", "exactness"), [("relaxed", EXACT), ("scalar", EXACT), ("simd128", NEAR_TIES)])
def test_rounds(run: Run, bundles: Callable[..., Path], form: str, isa: str, exactness: str) -> None:
    """Exact kernels make the rounds of the native library; all make texts that no method changes."""
    folder = bundles("native", form)
    sampled = {"temperature": 0.9, "seed": 5, "coupled": True, "logprobs": True}
    with Bundle(folder) as bundle, bundle.session() as session:
        texts = prompts(bundle.facts.vocab)[: 2 if isa == "scalar" else 5]  # it is slow
        cases, wanted = list[Case](), list[Any]()
        for prompt in texts:
            for method in METHODS:
                for more in ({}, sampled):
                    own = {"method": method, "maxNewTokens": TOKENS, "guesses": 4, "fixed": True, "ignoreEos": True}
                    cases.append(Case(folder, isa, prompt, own | more))
                    params = SamplingParams(0.9, seed=5, acceptance="coupled") if more else SamplingParams()
                    wanted.append(session.rounds(prompt, c_settings(params, method, TOKENS, 4, logprobs=bool(more))))
    found = run(cases)
    plain: dict[Any, list[int]] = {}
    accepted = 0
    for case, one, native in zip(cases, found, wanted, strict=True):
        assert (one["facts"]["isa"], one["facts"]["exactness"]) == (isa, exactness)
        tokens = [token for a_round in one["rounds"] for token in a_round["tokens"]]
        key = (tuple(case.prompt), "seed" in case.settings)
        assert plain.setdefault(key, tokens) == tokens, case
        accepted += sum(a_round["accepted"] for a_round in one["rounds"])
        if exactness == EXACT:
            ours = [(r["tokens"], r["drafted"], r["rejected"], r["accepted"], r["logprobs"]) for r in one["rounds"]]
            assert ours == [(r.tokens, r.drafted, r.rejected, r.accepted, r.logprobs) for r in native], case
    assert accepted > TOKENS


def test_bits_of_kernels(tmp_path: Path, node: str) -> None:
    """Relaxed kernels compute the specification's bits, every one of them."""
    native = build(tmp_path / "native", host_compiler() or "c++", host_isas()).run("hash", "scalar")
    _, parts = objects(tmp_path / "web", [TESTS / "selftest_all.cpp"], own=("memory_files", "one_thread"))
    link(tmp_path / "selftest.wasm", parts)
    script = tmp_path / "run.mjs"
    script.write_text(
        'import { WASI } from "node:wasi"; import { readFileSync } from "node:fs";\n'
        'const wasi = new WASI({ version: "preview1", args: process.argv.slice(2), returnOnExit: true });\n'
        "const module = await WebAssembly.compile(readFileSync(process.argv[2]));\n"
        "process.exitCode = wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject()));\n"
    )

    def hashes(isa: str) -> str:
        command = [node, "--no-warnings", str(script), str(tmp_path / "selftest.wasm"), "hash", isa]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert len(native.splitlines()) > 400
    assert hashes("relaxed") == native
    assert hashes("scalar") == native
    assert hashes("simd128") != native  # multiply-adds are rounded twice there


def test_errors(run: Run, bundles: Callable[..., Path]) -> None:
    folder = bundles("native", "int4")
    manifest = (folder / MANIFEST).read_text("utf-8")
    size = (folder / "model.data").stat().st_size
    graph = (folder / "model.native.onnx").stat().st_size

    def damaged(**change: Any) -> Case:
        return Case(folder, None, [1], change=change)

    old = json.dumps(json.loads(manifest) | {"schema_version": 4})
    broken = json.loads(manifest)
    broken["target"]["graphs"]["native"]["file"] = "../elsewhere"
    cases = {
        "unknown setting": (Case(folder, None, [1], {"metod": "plain"}), "refused", "metod"),
        "unknown method": (Case(folder, None, [1], {"method": "magic"}), "refused", "plain, ngram"),
        "no prompt": (Case(folder, None, []), "refused", "prompt"),
        "a token of no vocabulary": (Case(folder, None, [1 << 30]), "refused", str(1 << 30)),
        "half a token": (Case(folder, None, [1.5]), "refused", "1.5"),  # type: ignore[list-item]
        "temperature": (Case(folder, None, [1], {"temperature": -1}), "refused", "temperature"),
        "too long": (Case(folder, None, [1] * 100_000), "full", ""),
        "weights cut off": (damaged(file="model.data", size=size - 64), "refused", f"expected {size} bytes"),
        "graph cut off": (damaged(file="model.native.onnx", size=graph - 9), "refused", f"expected {graph} bytes"),
        "manifest cut off": (damaged(file=MANIFEST, size=1000), "refused", "expected JSON"),
        "no manifest": (damaged(file=MANIFEST, text=""), "refused", "expected JSON"),
        "another version": (damaged(file=MANIFEST, text=old), "refused", "schema 4"),
        "another folder": (damaged(file=MANIFEST, text=json.dumps(broken)), "refused", "../elsewhere"),
        "a list": (damaged(file=MANIFEST, text="[]"), "refused", ""),
        "no bundle": (Case(folder.parent / "nothing", None, [1]), "no file", MANIFEST),
        "other kernels": (Case(folder, "avx2", [1]), "refused", "avx2"),
    }
    found = run([case for case, _, _ in cases.values()])
    for (name, (_, code, words)), one in zip(cases.items(), found, strict=True):
        assert one.get("code") == code, (name, one)
        assert words in one["error"], (name, one)
