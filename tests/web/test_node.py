"""The npm package in Node: tokens of the native library, all calls, and damaged bundles."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.ngram_stores import build_store
from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.text.codec import TextCodec
from tests.support.c_sessions import MASK, Bundle, RoundFound, codec_of
from tests.support.c_sessions import settings_of as c_settings
from tests.support.selftest import TESTS, build, host_compiler, host_isas
from tools.build_web import ROOT, link, objects

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("native")]
HERE = Path(__file__).parent
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% for one in tools or [] %}tool {{ one.function.name }} {% endfor %}"
    "{% for one in messages %}{{ one.role | upper }}: {{ one.content }}\n{% endfor %}ROMEO:"
)
PROGRAM = """
import { EdgespecError, Engine, Model, type Counts, type Mask, type Round, type Settings } from "edgespec";
const even: Mask = (prefix, allowed, { prompt }) => allowed.fill(0, prefix.length - prompt);
const settings: Settings = { method: "ngram,speculative", stopTexts: ["end"], topLogprobs: 2, mask: even };
export async function write(show: (text: string) => void): Promise<Counts> {
  const engine = await Engine.open("bundle", { threads: 2, store: new Uint8Array(8), keep: true });
  const rounds = engine.chat([{ role: "user", content: "Hello" }], settings, { tools: [], enable_thinking: false });
  for await (const round of rounds) show(round.guessed + round.refused + (round.top?.[0]?.[0]?.logprob ?? ""));
  engine.close();
  const model = await Model.open(new Map([["edgespec.json", new Blob()]]), { ids: true });
  const all: Round[] = [];
  try {
    for await (const round of model.generate([1, 2], { seed: 1, temperature: 1 })) all.push(round);
  } catch (error) {
    if (error instanceof EdgespecError && error.code === "no memory") model.close();
  }
  await model.restore(await model.save());
  return model.counts();
}
"""
METHODS = "plain", "ngram", "speculative", "self-spec", "ngram,speculative"
TOKENS = 40


@dataclass(frozen=True)
class Case:
    folder: Path
    options: dict[str, Any]
    prompt: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] | None = None

    def written(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "options": self.options, "prompt": self.prompt,
                "settings": self.settings, "change": self.change}  # fmt: skip


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


def near(values: list[float]) -> Any:
    """Numbers of another C library, whose exponential function rounds in another way."""
    return pytest.approx(values, abs=1e-6)


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
                    cases.append(Case(folder, {"isa": isa, "threads": 1, "ids": True}, prompt, own | more))
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
            ours = [(r["tokens"], r["drafted"], r["rejected"], r["accepted"]) for r in one["rounds"]]
            assert ours == [(r.tokens, r.drafted, r.rejected, r.accepted) for r in native], case
            told = [logprob for r in one["rounds"] for logprob in r["logprobs"] or []]
            assert told == near([logprob for r in native for logprob in r.logprobs or []]), case
    assert accepted > TOKENS


def test_threads(run: Run, bundles: Callable[..., Path]) -> None:
    """No text depends on how many threads a pass has."""
    for form in ("int4", "int8"):
        folder = bundles("native", form)
        cases = []
        for threads in (1, 2, 3, 5):
            for prompt in prompts(100)[3:]:
                for method in ("plain", "speculative"):
                    own = {"method": method, "maxNewTokens": TOKENS, "guesses": 4, "fixed": True, "logprobs": True}
                    cases.append(Case(folder, {"threads": threads, "ids": True}, prompt, own))
        found = run(cases)
        assert [one["facts"]["threads"] for one in found[:: len(cases) // 4]] == [1, 2, 3, 5]
        each = len(cases) // 4
        for at, one in enumerate(found):
            assert one["rounds"] == found[at % each]["rounds"]
    refused = run([Case(folder, {"threads": count}, [1]) for count in (0, 1.5, 65)])
    assert all(one["code"] == "refused" and "from 1 to 64" in one["error"] for one in refused)


def test_calls(package: Path, node: str, bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Every call gives what the native library gives, fails as an EdgespecError, and leaves nothing behind."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundles("native", "int4"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    codec = TextCodec(folder)
    prompt, messages = "My lord, what light is this?", [{"role": "user", "content": "What light is this?"}]
    ids = codec.encode(prompt)
    parity = MASK(lambda user, text, count, path, length, row, columns, out: only_even(out, columns))
    with Bundle(folder) as bundle:
        vocab = int(bundle.facts.vocab)
        bundle.set_codec(codec_of(codec))
        texts = [token for _ in range(3) for token in np.random.default_rng(3).integers(vocab, size=200)]
        build_store(tmp_path / "own store", [np.array(texts, np.int32)], vocab, "ab" * 32)
        known = [int(token) for token in texts[40:60]]
        with bundle.session(store=tmp_path / "own store") as session:
            plain = session.rounds(ids, c_settings(method="plain", tokens=TOKENS, top_logprobs=3))
            words = "".join(one.text or "" for one in plain)
            stop = words[len(words) // 2 :][:3]
            stopped = session.rounds(ids, c_settings(method="ngram", tokens=TOKENS, stop_texts=[stop]))
            masked = session.rounds(ids, c_settings(method="ngram", tokens=TOKENS, mask=parity))
            stored = session.rounds(known, c_settings(method="ngram", tokens=TOKENS, guesses=8, fixed=1))
    asked = {"package": str(package), "folder": str(folder), "store": str(tmp_path / "own store"), "prompt": prompt,
             "known": known, "messages": messages, "stop": stop, "tokens": TOKENS}  # fmt: skip
    done = subprocess.run([node, "--expose-gc", str(HERE / "calls.mjs")], input=json.dumps(asked), capture_output=True,
                          text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)

    def same(rounds: list[Any], wanted: list[RoundFound]) -> None:
        assert [token for one in rounds for token in one["tokens"]] == [token for one in wanted for token in one.tokens]
        assert "".join(one["text"] for one in rounds) == "".join(one.text or "" for one in wanted)

    same(found["plain"], plain)
    tops = [entry for one in found["plain"] for row in one["top"] for entry in row]
    wanted = [entry for one in plain for row in one.top or [] for entry in row]
    assert [entry["id"] for entry in tops] == [token for token, _ in wanted]
    assert [entry["logprob"] for entry in tops] == near([logprob for _, logprob in wanted])
    same(found["stopped"], stopped)
    assert found["stopped"][-1]["finish"] == "stop text"
    same(found["masked"], masked)
    assert all(token % 2 == 0 for one in found["masked"] for token in one["tokens"])
    same(found["stored"], stored)
    assert found["stored"][0]["drafted"] == stored[0].drafted == texts[60 : 60 + len(stored[0].drafted)] != []
    for one in found["stored"]:
        assert one["text"].startswith(one["guessed"])
    assert found["chat"] == codec.encode(f"USER: {messages[0]['content']}\nROMEO:", special=False)
    assert found["tools"] == codec.encode(f"tool add USER: {messages[0]['content']}\nROMEO:", special=False)
    assert found["expected"] < len(found["plain"])
    assert found["restored"] > 0
    assert found["reused"] == found["restored"]
    for name, (code, words) in {
        "cancelled": ("cancelled", "cancelled"), "cancelledPrompt": ("cancelled", "cancelled"),
        "replaced": ("cancelled", "another text was begun"), "aborted": ("cancelled", "cancelled"),
        "maskFails": (None, "no such rule"), "infinite": ("refused", "temperature: expected a finite number"),
        "stopTexts": ("refused", "stopTexts: expected a list"), "closed": ("refused", "was closed"),
        "template": ("refused", "roles must alternate"), "noStore": ("no file", "nothing"),
        "damagedStore": ("refused", "store"), "damagedSession": ("refused", ""), "noText": ("refused", "for token ids"),
        "maxBytes": ("no memory", "expected at least"),
    }.items():  # fmt: skip
        assert found[name]["code"] == code, (name, found[name])
        assert words in found[name]["error"], (name, found[name])
        assert found[name]["name"] == ("Error" if code is None else "EdgespecError")
    assert found["after"] == found["replacing"] == found["plain"]
    assert found["memory"][-1] == found["memory"][1], found["memory"]  # of the module
    assert found["left"][-1] < found["left"][4] + 20e6, found["left"]  # of the process, with bundles opened and closed
    assert found["threadsLeft"] == 0


def only_even(out: Any, columns: int) -> int:
    np.ctypeslib.as_array(out, (columns,))[1::2] = 0
    return 0


def test_bits_of_kernels(tmp_path: Path, node: str) -> None:
    """Relaxed kernels compute the specification's bits, every one of them."""
    native = build(tmp_path / "native", host_compiler() or "c++", host_isas()).run("hash", "scalar")
    _, parts = objects(ROOT / "build" / "web", [TESTS / "selftest_all.cpp"], own=("memory_files",))
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
        return Case(folder, {}, [1], change=change)

    old = json.dumps(json.loads(manifest) | {"schema_version": 4})
    broken = json.loads(manifest)
    broken["target"]["graphs"]["native"]["file"] = "../elsewhere"
    cases = {
        "unknown setting": (Case(folder, {}, [1], {"metod": "plain"}), "refused", "metod"),
        "unknown method": (Case(folder, {}, [1], {"method": "magic"}), "refused", "plain, ngram"),
        "no prompt": (Case(folder, {}, []), "refused", "prompt"),
        "a token of no vocabulary": (Case(folder, {}, [1 << 30]), "refused", str(1 << 30)),
        "half a token": (Case(folder, {}, [1.5]), "refused", "1.5"),  # type: ignore[list-item]
        "temperature": (Case(folder, {}, [1], {"temperature": -1}), "refused", "temperature"),
        "no tokens": (Case(folder, {}, [1], {"maxNewTokens": 0}), "refused", "maxNewTokens: expected more than 0"),
        "no share": (Case(folder, {}, [1], {"topP": 0}), "refused", "topP: expected more than 0"),
        "no context": (Case(folder, {"context": 0}, [1]), "refused", "context 0: expected more than 0"),
        "no bytes": (Case(folder, {"maxBytes": 0}, [1]), "refused", "maxBytes 0: expected more than 0"),
        "no modules": (Case(folder, {"modules": "file:///nothing"}, [1]), "no file", "nothing/edgespec"),
        "too long": (Case(folder, {}, [1] * 100_000), "full", ""),
        "a bit of weights": (damaged(file="model.data", flip=size // 2), "refused", "model.data: damaged"),
        "a bit of the graph": (damaged(file="model.native.onnx", flip=graph - 9), "refused", "damaged"),
        "a bit of the tokenizer": (damaged(file="tokenizer.json", flip=99), "refused", "tokenizer.json: damaged"),
        "weights cut off": (damaged(file="model.data", size=size - 64), "refused", f"expected {size} bytes"),
        "graph cut off": (damaged(file="model.native.onnx", size=graph - 9), "refused", f"expected {graph} bytes"),
        "manifest cut off": (damaged(file=MANIFEST, size=1000), "refused", "expected JSON"),
        "no manifest": (damaged(file=MANIFEST, text=""), "refused", "expected JSON"),
        "another version": (damaged(file=MANIFEST, text=old), "refused", "schema 4"),
        "another folder": (damaged(file=MANIFEST, text=json.dumps(broken)), "refused", "../elsewhere"),
        "a list": (damaged(file=MANIFEST, text="[]"), "refused", ""),
        "no bundle": (Case(folder.parent / "nothing", {}, [1]), "no file", MANIFEST),
        "other kernels": (Case(folder, {"isa": "avx2"}, [1]), "refused", "avx2"),
    }
    found = run([case for case, _, _ in cases.values()])
    for (name, (_, code, words)), one in zip(cases.items(), found, strict=True):
        assert one.get("code") == code, (name, one)
        assert words in one["error"], (name, one)


def test_what_is_published(package: Path, tmp_path: Path) -> None:
    """The archive has scripts, types, modules and licenses, and its types are enough for a strict program."""
    folder = package.parent
    done = subprocess.run(["npm", "pack", "--json", "--pack-destination", str(tmp_path)], cwd=folder, check=True,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    (packed,) = json.loads(done.stdout)
    types = {f"dist/{script.stem}.d.ts" for script in (folder / "src").iterdir()}
    scripts = {"dist/index.js", "dist/worker.js", "dist/thread.js"}
    modules = {"dist/edgespec.wasm", "dist/edgespec-relaxed.wasm"}
    texts = {"package.json", "README.md", "LICENSE", "THIRD-PARTY.md"}
    assert {file["path"] for file in packed["files"]} == types | scripts | modules | texts
    assert packed["size"] < 2_000_000
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    third = (folder / "THIRD-PARTY.md").read_text("utf-8")
    assert all(name in third for name in json.loads((folder / "package.json").read_text("utf-8"))["dependencies"])
    with tarfile.open(tmp_path / packed["filename"]) as archive:
        archive.extractall(tmp_path / "node_modules", filter="data")
    (tmp_path / "node_modules" / "package").rename(tmp_path / "node_modules" / "edgespec")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.ts").write_text(PROGRAM)
    tsc = folder / "node_modules" / "typescript" / "bin" / "tsc"
    words = ["--noEmit", "--strict", "--module", "nodenext", "--target", "es2022", "--lib", "es2023,dom"]
    subprocess.run(["node", str(tsc), *words, str(tmp_path / "program.ts")], cwd=tmp_path, check=True, timeout=300)
