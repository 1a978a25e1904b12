"""Write the table of features by host in docs/platforms.md, from the declarations of each host.

python -m tools.host_features
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgespec import Engine
from edgespec.decoding.settings import every_setting
from edgespec.drafters.registry import METHODS
from edgespec.runtimes.options import LoadOptions

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/platforms.md"
BEGIN, END = "<!-- hosts:begin -->\n", "<!-- hosts:end -->"
HEADER, CRATE = "swift/Sources/CEdgespec/edgespec.h", "rust/edgespec-sys/src/lib.rs"
SOURCES = {
    "C, Swift": HEADER,
    "Rust": "rust/edgespec/src/lib.rs",
    "Kotlin": "android_demo/edgespec/src/main/kotlin/**/*.kt",
    "web": "web/src/*.ts",
}
CHAINS = {"eagle", "mtp"}  # Python also draws trees
IN_SESSIONS = r"\* plain, (.*?), or several of these"  # the methods of sessions, in the header


@dataclass(frozen=True)
class Feature:
    """A feature, and its declaration in each host: None where a host lacks it.

    Attributes:
        python: settings, options of loading, or methods of ``Engine``, with spaces between.
        c: a name in the header; in Rust ``edgespec-sys`` has it, where the safe crate does not.
        rust, kotlin, web: parts of the sources.
    """

    name: str
    python: str | None = None
    c: str | None = None
    rust: str | None = None
    kotlin: str | None = None
    web: str | None = None


FEATURES = (
    Feature("conversations by the model's chat template", "chat", "edgespec_chat", "pub fn chat(", "fun chat(",
            "chat("),
    Feature("text or token ids, round by round", "stream", "edgespec_next", "impl Iterator for Text", "fun stream(",
            "async *generate("),
    Feature("sampling, penalties, bias", "temperature logit_bias frequency_penalty", "frequency_penalty",
            "pub frequency_penalty", "val frequencyPenalty", "frequencyPenalty?"),
    Feature("sampled texts equal plain decoding's (`coupled`)", "acceptance", "coupled", "pub coupled",
            "val acceptance", "coupled?"),
    Feature("stop texts", "stop", "stop_texts", "pub stop_texts", "val stop:", "stopTexts?"),
    Feature("top log-probabilities", "top_logprobs", "top_logprobs", "pub top_logprobs", "val topLogprobs",
            "topLogprobs?"),
    Feature("an expected text", "prediction", "prediction", "pub prediction", "val prediction", "prediction?"),
    Feature("n-gram stores", "ngram_store", "ngram_store", "pub ngram_store", "ngramStore: File", "store?"),
    Feature("cancellation, also while a prompt is read", "cancel", "edgespec_cancel", "pub fn cancel(",
            "fun cancel(", "cancel()"),
    Feature("texts saved with their keys and values", "save_session", "edgespec_session_save", "pub fn save(",
            "cache: File", "save()"),
    Feature("a memory limit", "budget", "max_bytes", "pub max_bytes", "memory: MemoryFacts", "maxBytes?"),
    Feature("several texts over the same weights", "generate_batch", "edgespec_session_open", "pub fn session(",
            "SessionPool"),
    Feature("masks of tokens, by a function of the app", None, "mask", None, "interface Constraint", "mask?"),
    Feature("grammars and JSON schemas", "grammar"),
    Feature("fewer threads on a hot device", None, "edgespec_bundle_limit", "pub fn limit_threads(", "heat: Heat"),
    Feature("LoRA adapters by text", "adapter", "edgespec_bundle_add_adapter", "pub fn add_adapter(",
            "val adapter:"),
    Feature("weights streamed from a disk", "budget", "edgespec_bundle_open_streamed", "pub fn open_streamed("),
    Feature("bundles for ONNX Runtime's operators", "operators", None, None, "class StockModel"),
    Feature("passes of any other runtime", None, "edgespec_bundle_open_hosted"),
    Feature("batches in one pass", "generate_batch"),
    Feature("translation, sound, pictures, speech", "source_language transcribe draw speak"),
    Feature("beams, guidance, embeddings", "beams guidance_scale embed"),
)  # fmt: skip


@cache
def source(files: str) -> str:
    """Return the text of files, by a pattern."""
    found = sorted(ROOT.glob(files))
    if not found:
        raise LookupError(f"no files {files}")
    return "\n".join(path.read_text("utf-8") for path in found)


@cache
def of_python() -> frozenset[str]:
    """Return the names of settings, options of loading, and methods of ``Engine``."""
    settings = {one.name for one, _ in every_setting()} | {"cancel"}  # an argument next to the settings
    return frozenset(settings | set(LoadOptions.__dataclass_fields__) | set(dir(Engine)))


def session_methods() -> list[str]:
    """Return the methods that the header says sessions have, without plain decoding."""
    (found,) = re.findall(IN_SESSIONS, source(HEADER), re.DOTALL)
    return re.findall(r"[\w-]+", found)


def row(feature: Feature) -> list[str]:
    """Return whether each host has a feature.

    Raises:
        LookupError: a declaration is not found.
    """
    words = dict(zip(SOURCES, (feature.c, feature.rust, feature.kotlin, feature.web), strict=True))
    there = {host: word is not None and word in source(SOURCES[host]) for host, word in words.items()}
    below = feature.c is not None and re.search(rf"\b{feature.c}\b", source(CRATE)) is not None
    missing = [f"Python: {name}" for name in (feature.python or "").split() if name not in of_python()]
    missing += [f"{host}: {word}" for host, word in words.items() if word and not there[host]]
    if missing:
        raise LookupError(f"{feature.name}: not declared: {', '.join(missing)}")
    cells = {host: "yes" if found else "no" for host, found in there.items()}
    if below and not there["Rust"]:
        cells["Rust"] = "`edgespec-sys`"
    return ["yes" if feature.python else "no", *cells.values()]


def table() -> str:
    """Return the table: methods, which all sessions have or none, and features."""
    shared = session_methods()
    names = [name for name in METHODS if name != "ar"]
    trees = [name for name in names if name in CHAINS]
    alike = ["`plain`, `auto`", *(f"`{name}`" for name in names if name in shared and name not in trees)]
    others = [f"`{name}`" for name in names if name not in shared]
    rows = [["feature", "Python", *SOURCES], ["-"] * 6]
    rows.append([", ".join(alike), *["yes"] * 5])
    rows.append([", ".join(f"`{name}`" for name in trees), "chains, trees", *["chains"] * 4])
    rows.append([", ".join(others), "yes", *["no"] * 4])
    rows += [[feature.name, *row(feature)] for feature in FEATURES]
    return "".join(f"|{'|'.join(cells)}|\n" for cells in rows)


def main() -> None:
    """Write the table into the page."""
    page = (ROOT / PAGE).read_text("utf-8")
    before, rest = page.split(BEGIN)
    (ROOT / PAGE).write_text(before + BEGIN + table() + END + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
