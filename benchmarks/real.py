"""Compare published models with llama.cpp on the same file: quality, speed, memory, first token.

    python -m benchmarks.real FOLDER --text TEXT [--llama BIN] [--prebuilt NODE] [-o FOLDER] [--markdown]
    python -m benchmarks.real FOLDER --only 1.5b --prompts FILE --llama BIN -o FOLDER

FOLDER holds GGUF files; the default is ``EDGESPEC_REAL_MODELS``.  BIN is a folder with llama-server and
llama-perplexity, built for this processor; NODE a folder in which ``npm install node-llama-cpp`` was run, whose
prebuilt llama.cpp is faster on some processors.  Every comparison is with the faster of the two.

Steps for each model: ``edgespec export FILE``, without options that concern quality, with every method that needs no
training, and a smaller file of the same tokenizer as draft; ``edgespec verify``; perplexity, KL and top-1 of the bundle
and of llama.cpp (llama-perplexity) against a float32 run of the same file.  Then each runtime, in a separate process,
decodes PROMPTS, interleaved and greedy, NEW tokens each.  Further figures: a prefill of PREFILL tokens; the peak of
resident memory; the seconds of a whole process to its first token.  llama.cpp's own speculation with the same draft is
part of the same interleaved runs.

``--prompts`` gives a file of other chats, one per line.  Then only the speed is measured, each prompt once, and ratios
are also means over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from socket import create_server
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, ratio, show
from edgespec.cli.prompts import read_prompt_file
from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.runtimes.files.manifest import MANIFEST

NEW, PREFILL, CONTEXT, WINDOW = 96, 512, 2048, 512  # tokens
WINDOWS = 7  # of WINDOW tokens; llama-perplexity judges the second half of each: 1,785 positions
WITHOUT_TRAINING = ("ngram", "self-spec")
PROMPTS = {
    "chat": "Why does the moon look larger near the horizon? Answer in one paragraph.",
    "code": "Write a Python function that merges two sorted lists, with a docstring and two tests.",
    "rewriting": "Correct the spelling and write the text again: 'Their are too reasons why this meny peple came to "
    "the market on saterday: the whether was good, and the prises of aples and pares were lower then last weak.'",
    "story": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
}  # by kind


# -- processes that decode -------------------------------------------------------------------------------------------


class Lines:
    """A process that answers lines of JSON; its first line says that it is ready."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        env = os.environ | dict(environment or {})
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        while not self._answer().get("ready"):
            pass

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # some runtimes print other lines while they load
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit(f"{self.process.args!r} ended")

    def close(self) -> None:
        self.process.communicate()  # it ends at the end of its input


class Server:
    """llama-server, which decodes by its /completion."""

    def __init__(self, command: Sequence[str]) -> None:
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)  # fmt: skip
        self._url = f"http://127.0.0.1:{port}"
        end = monotonic() + 120
        while True:
            try:
                with urlopen(f"{self._url}/health", timeout=5):
                    return
            except (URLError, OSError):
                if self.process.poll() is not None or monotonic() > end:
                    sys.exit(f"{command[0]} did not start: {shlex.join(command)}")
                sleep(0.02)

    def ask(self, tokens: Sequence[int], new: int, **_: Any) -> dict[str, Any]:
        asked = {"prompt": list(tokens), "n_predict": new, "temperature": 0, "top_k": 1, "ignore_eos": True,
                 "cache_prompt": False, "return_tokens": True}  # fmt: skip
        sent = Request(f"{self._url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urlopen(sent, timeout=600) as answer:
            found = json.load(answer)
        times = found["timings"]
        return {"prefill_ms": times["prompt_ms"], "decode_ms": times["predicted_ms"], "tokens": found["tokens"]}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def serve_lines(bundle: Path, threads: int) -> None:
    """Decode with a bundle what lines of JSON ask for; ``text`` and ``chat`` give token ids."""
    import edgespec

    with edgespec.load(bundle, threads=threads, context=CONTEXT) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if "text" in asked:
                found: dict[str, Any] = {"tokens": engine.codec.encode(asked["text"])}
            elif "chat" in asked:
                chats = (
                    engine.codec.chat_template is not None
                )  # a model that was not tuned for chats gets the bare words
                words = [{"role": "user", "content": asked["chat"]}]
                found = {"tokens": engine.chat_prompt(words) if chats else engine.codec.encode(asked["chat"])}
            else:
                result = engine.generate(asked["tokens"], method=asked["method"], max_new_tokens=asked["new"],
                                         temperature=0, ignore_eos=True)  # fmt: skip
                stats = result.stats
                found = {
                    "prefill_ms": stats.prefill_ms,
                    "decode_ms": stats.draft_ms + stats.verify_ms + stats.other_ms,
                    "tokens": result.tokens,
                    "tokens_per_round": stats.tokens_per_round,
                    "acceptance_rate": stats.acceptance_rate,
                }
            print(json.dumps(found), flush=True)


def peak_mib(process: int) -> float:
    """Read the largest resident memory of a process so far."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


# -- quality ---------------------------------------------------------------------------------------------------------


@dataclass
class Judged:
    """llama.cpp's results of a text: tokens int32 [windows, WINDOW], and where its rows of log-probabilities begin."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.uint16]  # [windows, positions, 4 + vocabulary rounded up to even]: two float32, then levels
    vocab: int

    @classmethod
    def read(cls, file: Path) -> Judged:
        """Read what ``llama-perplexity --kl-divergence-base`` writes (tools/perplexity/perplexity.cpp)."""
        with file.open("rb") as stream:
            if stream.read(8) != b"_logits_":
                sys.exit(f"{file}: expected log-probabilities of llama-perplexity")
            window, vocab, count = np.frombuffer(stream.read(12), np.int32).tolist()
            tokens = np.frombuffer(stream.read(4 * window * count), np.int32).reshape(count, window)
            start = stream.tell()
        positions, width = window - 1 - window // 2, 4 + 2 * ((vocab + 1) // 2)
        return cls(tokens, np.memmap(file, np.uint16, "r", start, (count, positions, width)), vocab)

    def log_probabilities(self, window: int) -> NDArray[np.float32]:
        """Give float32 [positions, vocabulary] of the second half of a window."""
        rows = np.ascontiguousarray(self.rows[window])
        scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
        return scale[:, None] * rows[:, 4 : 4 + self.vocab] + least[:, None]


def as_stored(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Round log-probabilities [positions, vocabulary] as llama-perplexity's files do.

    They hold 65,536 levels, and nothing more than 16 below the largest one: what is less likely counts as that.  Of
    many thousand tokens, that lowers a divergence by some .0001, so all rows that are compared are rounded alike.
    """
    most = rows.max(-1, keepdims=True)
    least = np.maximum(rows.min(-1, keepdims=True), most - 16)
    step = (most - least) / np.float32(65535)
    return least + step * np.rint(np.maximum(rows - least, 0) / step)


def judge_by_llama(llama: Path, model: Path, text: Path, threads: int, file: Path) -> Judged:
    """Have llama.cpp read the text."""
    subprocess.run([str(llama / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", str(WINDOW), "-b",
                    str(WINDOW), "-t", str(threads), "--chunks", str(WINDOWS), "--kl-divergence-base", str(file)],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return Judged.read(file)


def quality(bundle: Path, model: Path, judged: Judged, threads: int) -> dict[str, Any]:
    """Compare a bundle and llama.cpp with a float32 run of the same file, on the same tokens."""
    from benchmarks.quality import bundle_variant, read
    from edgespec.export.bundle.model import write_model
    from edgespec.export.bundle.model_part import ModelSpec, open_model
    from edgespec.export.measuring.parity import log_softmax
    from edgespec.runtimes.opening import open_slot
    from edgespec.runtimes.slots.shared import Model
    from edgespec.runtimes.text.codec import TextCodec

    tokens, begin = judged.tokens.astype(np.int64), TextCodec(bundle).encode("")[:1]
    tokens[:, : len(begin)] = begin  # llama-perplexity begins every window so
    half = tokens.shape[1] // 2
    found: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        exact = write_model(Path(folder), open_model(model, WINDOW), ModelSpec("fp32")).part
        reference = open_slot(Model(Path(folder), exact, "native", threads))
        with bundle_variant(bundle, threads)[1]() as slot:
            windows = enumerate(zip(read(reference, tokens), read(slot, tokens), strict=True))
            for at, (exactly, logits) in windows:
                base = log_softmax(exactly[half:-1])[:, : judged.vocab]
                following = np.arange(len(base)), tokens[at, half + 1 :]
                for name, one in (
                    ("float32", as_stored(base)),
                    ("edgespec", as_stored(log_softmax(logits[half:-1])[:, : judged.vocab])),
                    ("llama.cpp", judged.log_probabilities(at)),
                ):
                    sums = found.setdefault(name, {"loss": [], "kl": [], "same": []})
                    sums["loss"].append(-one[following])
                    sums["kl"].append((np.exp(base) * (base - one)).sum(-1))
                    sums["same"].append(base.argmax(-1) == one.argmax(-1))
    made: dict[str, Any] = {"positions": int(tokens.shape[0] * (tokens.shape[1] - half - 1))}
    for name, sums in found.items():
        loss, kl, same = (float(np.concatenate(sums[key]).mean()) for key in ("loss", "kl", "same"))
        made[name] = {"perplexity": round(float(np.exp(loss)), 3), "kl": round(kl, 5), "top1": round(same, 4)}
    return made


# -- a model ---------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Results of one model."""

    model: str
    draft: str | None
    export_seconds: float = 0.0  # 0 = the bundle was there
    line: str = ""  # what the export says of its choice
    format: str = ""
    bytes: int = 0
    verified: dict[str, str] = field(default_factory=dict)  # by method
    quality: dict[str, Any] | None = None
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    gain: dict[str, Any] = field(default_factory=dict)  # over our own plain decoding
    over_llama_cpp: dict[str, Any] = field(default_factory=dict)  # over the faster llama.cpp, plain
    over_its_drafts: dict[str, Any] = field(default_factory=dict)  # over llama.cpp with the draft
    prefill: dict[str, float] = field(default_factory=dict)  # tokens per second
    peak_mib: dict[str, float] = field(default_factory=dict)
    first_token_seconds: dict[str, float] = field(default_factory=dict)
    same_text: dict[str, str] = field(default_factory=dict)  # as the runtime's own plain decoding


def command(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run edgespec; what it says on its way goes to our own stderr."""
    line = [sys.executable, "-m", "edgespec", *map(str, words)]
    return subprocess.run(line, text=True, stdout=subprocess.PIPE, check=True, **how)


def draft_of(model: Path, models: Sequence[Path]) -> Path | None:
    """Find the largest file of the same tokenizer that is at most half as large."""
    fits = [one for one in models if one.stat().st_size <= model.stat().st_size / 2]
    own = _pieces(model)
    return max((one for one in fits if _pieces(one) == own), key=lambda one: one.stat().st_size, default=None)


@cache
def _pieces(model: Path) -> str:
    """Digest the pieces of a file's tokenizer."""
    from edgespec.export.source.gguf_files import read_gguf_header

    return sha256(json.dumps(read_gguf_header(model)[0].get("tokenizer.ggml.tokens")).encode()).hexdigest()


def export(model: Path, draft: Path | None, output: Path, threads: int) -> Report:
    """Make a bundle without asking for a format; an existing one is used."""
    report = Report(model.name, None if draft is None else draft.name)
    if not (output / MANIFEST).is_file():
        methods = [*WITHOUT_TRAINING, *(["speculative"] if draft else [])]
        words = [word for method in methods for word in ("--method", method)]
        start = perf_counter()
        command("export", model, "-o", output, "--threads", threads, *words, *(["--draft", draft] if draft else []))
        report.export_seconds = round(perf_counter() - start, 1)
    manifest = json.loads((output / MANIFEST).read_text("utf-8"))
    report.line = (manifest["provenance"].get("format_choice") or {}).get("line", "")
    report.format = manifest["target"]["format"]
    report.bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return report


def first_token(run: Callable[[], object]) -> float:
    """Take seconds of a whole process, its files in the page cache: the smallest of three."""
    times = []
    for _ in range(3):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return round(min(times), 2)


@contextmanager
def runtimes(bundle: Path, model: Path, draft: Path | None, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start every runtime -> by name what can be asked; edgespec's plain decoding is ``edgespec``."""
    threads = str(arguments.threads)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        ours = Lines([sys.executable, "-m", "benchmarks.real", "--worker", str(bundle), "--threads", threads],
                     {"EDGESPEC_PROMPT_CACHE": "0"})  # fmt: skip
        stack.callback(ours.close)
        found["edgespec"] = ours
        if arguments.llama:
            base = [str(arguments.llama / "llama-server"), "-m", str(model), "-t", threads, "-c", str(CONTEXT),
                    "-np", "1"]  # fmt: skip
            found["llama.cpp"] = Server(base)
            stack.callback(found["llama.cpp"].close)
            if draft:
                found["llama.cpp, draft"] = Server([*base, "-md", str(draft)])
                stack.callback(found["llama.cpp, draft"].close)
        if arguments.prebuilt:
            script = Path(__file__).parent / "rivals" / "node_llama.mjs"
            found["llama.cpp, prebuilt"] = Lines(["node", str(script), str(model), threads, str(CONTEXT)],
                                                 {"NODE_LLAMA_CPP": str(arguments.prebuilt)})  # fmt: skip
            stack.callback(found["llama.cpp, prebuilt"].close)
        yield found


def measure(report: Report, started: dict[str, Any], methods: Sequence[str], chats: Sequence[str], turns: int) -> None:
    """Let all decode the same prompts, interleaved."""
    ours = started["edgespec"]
    prompts = [ours.ask(chat=prompt)["tokens"] for prompt in chats]
    runs: dict[str, Callable[[list[int]], dict[str, Any]]] = {}
    for method in ("ar", *methods):
        name = "edgespec" if method == "ar" else f"edgespec, {method}"
        runs[name] = lambda tokens, method=method: ours.ask(tokens=tokens, new=NEW, method=method)  # type: ignore[misc]
    for name, one in started.items():
        if name != "edgespec":
            runs[name] = lambda tokens, one=one: one.ask(tokens=tokens, new=NEW)  # type: ignore[misc]
    for run in runs.values():
        run(prompts[0])  # warm
    times: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[list[int]]] = {name: [] for name in runs}
    for turn in range(turns):
        for tokens in prompts:
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                found = runs[name](tokens)
                times[name].append(found["decode_ms"] / (len(found["tokens"]) - 1))
                texts[name].append(found["tokens"])
    report.tokens_per_second = {name: round(1000 / median(each), 1) for name, each in times.items()}
    report.gain = {name: ratio(times["edgespec"], each) for name, each in times.items() if name.startswith("edgespec,")}
    rivals = [name for name in ("llama.cpp", "llama.cpp, prebuilt") if name in times]
    if rivals:
        faster = min(rivals, key=lambda name: median(times[name]))
        report.over_llama_cpp = {"beside": faster} | {
            name: ratio(times[faster], each) for name, each in times.items() if name != faster
        }
    if its := times.get("llama.cpp, draft"):
        report.over_its_drafts = {
            name: ratio(its, each) for name, each in times.items() if name.startswith("edgespec,")
        }
    for name, each in texts.items():
        base = texts["edgespec" if name.startswith("edgespec") else "llama.cpp" if "llama.cpp" in texts else name]
        report.same_text[name] = f"{sum(a == b for a, b in zip(each, base, strict=True))}/{len(each)}"
    # each begins with another number, so that no runtime finds a prefix in its cache
    texts_read = [ours.ask(text=f"{at} " + "The quick brown fox jumps over the lazy dog. " * 60)["tokens"][:PREFILL]
                  for at in range(4)]  # fmt: skip
    for name, one in started.items():
        ms = [one.ask(tokens=text, new=1, method="ar")["prefill_ms"] for text in texts_read][1:]
        report.prefill[name] = round(1000 * PREFILL / min(ms), 1)
        report.peak_mib[name] = round(peak_mib(one.process.pid))


def look_at(model: Path, models: Sequence[Path], arguments: argparse.Namespace) -> Report:
    """Measure everything of one model."""
    draft = draft_of(model, models)
    bundle = arguments.output / model.stem
    report = export(model, draft, bundle, arguments.threads)
    if arguments.prompts:
        with runtimes(bundle, model, draft, arguments) as started:
            methods = ["speculative"] if draft else WITHOUT_TRAINING
            measure(report, started, [*methods, "auto"], read_prompt_file(arguments.prompts), turns=1)
        return report
    verified = json.loads(
        command(
            "verify", bundle, "--max-prompts", 4, "--max-new-tokens", 64, "--json", "--threads", arguments.threads
        ).stdout
    )
    report.verified = {one["method"]: EXACT if one["exact"] else NEAR_TIES for one in verified["methods"]}
    if arguments.llama:
        with tempfile.TemporaryDirectory() as folder:
            judged = judge_by_llama(arguments.llama, model, arguments.text, arguments.threads, Path(folder) / "base")
            report.quality = quality(bundle, model, judged, arguments.threads)
            del judged
    with runtimes(bundle, model, draft, arguments) as started:
        measure(report, started, [*report.verified, "auto"], list(PROMPTS.values()), arguments.turns)
    words = ("run", bundle, "--prompt", "Write a haiku.", "--max-new-tokens", 1, "--threads", arguments.threads)
    report.first_token_seconds["edgespec"] = first_token(lambda: command(*words, stderr=subprocess.DEVNULL))
    return report


def markdown(reports: Sequence[Report]) -> str:
    """Give the table that the pages show."""
    heads = ("file", "format", "perplexity: float32, edgespec, llama.cpp", "KL to float32: edgespec, llama.cpp",
             "tokens/s: llama.cpp, plain, best method", "gain of the best method", "over llama.cpp",
             "prefill (llama.cpp), tokens/s", "peak MiB (llama.cpp)", "first token, s")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in reports:
        best = max(one.gain, key=lambda name: one.gain[name]["ratio"])
        rival = one.over_llama_cpp.get("beside", "")
        found = one.quality or {}
        perplexities, divergences = (
            ", ".join(str(found[name][key]) for name in names if name in found)
            for key, names in (("perplexity", ("float32", "edgespec", "llama.cpp")), ("kl", ("edgespec", "llama.cpp")))
        )
        over = one.over_llama_cpp.get(best, {}).get("ratio", "")
        rates = ", ".join(str(one.tokens_per_second.get(name, "-")) for name in (rival, "edgespec", best))
        lines.append(
            f"| {one.model} | {one.format} | {perplexities} | {divergences} | {rates} "
            f"| {best.removeprefix('edgespec, ')} {one.gain[best]['ratio']:.2f}x | {over} "
            f"| {one.prefill['edgespec']} ({one.prefill.get(rival, '-')}) "
            f"| {one.peak_mib['edgespec']} ({one.peak_mib.get(rival, '-')}) | {one.first_token_seconds['edgespec']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get("EDGESPEC_REAL_MODELS"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help="what quality is measured on, at least 8,000 tokens")
    parser.add_argument("--prompts", type=Path, help="a file of chats, whose speed alone is measured")
    parser.add_argument("--only", default="", help="part of the name of the models to look at")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--prebuilt", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("-o", "--output", type=Path, help="folder of the bundles, which are kept and not made again")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="the table instead of JSON")
    arguments = parser.parse_args()
    if arguments.worker:
        serve_lines(arguments.worker, arguments.threads)
        return
    if arguments.folder is None or not (models := sorted(Path(arguments.folder).glob("*.gguf"))):
        parser.error("expected a folder of GGUF files, as an argument or in EDGESPEC_REAL_MODELS")
    if arguments.llama and not arguments.text and not arguments.prompts:
        parser.error("--llama needs --text")
    with tempfile.TemporaryDirectory() as folder:
        arguments.output = arguments.output or Path(folder)
        reports = [look_at(model, models, arguments) for model in models if arguments.only in model.name]
    failed = [f"{one.model}: {method} {word}" for one in reports for method, word in one.verified.items()
              if word != EXACT]  # fmt: skip
    if arguments.markdown:
        print(markdown(reports))
    else:
        show(conditions(threads=arguments.threads, new=NEW) | {"models": [vars(one) for one in reports]})
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
