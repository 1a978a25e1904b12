"""``edgespec info`` and ``edgespec devices``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    attention_lines,
    bundle_argument,
    emit_json,
    json_option,
    option,
    print_table,
    table_console,
)
from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.planning.budget import show_bytes
from edgespec.runtimes.files.formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from edgespec.planning.profiles import Profile
    from edgespec.planning.speed import Within
    from edgespec.runtimes.files.manifest import Manifest, ModelPart, SamplingPart, SkipSetPart
    from edgespec.runtimes.files.operators import OperatorChoice
    from edgespec.runtimes.slots.cpu import StockRows


@click.command("info")
@bundle_argument
@option("--no-check", "Do not compare the files' SHA-256.", bool)
@option("--budget", "Also say what would be read from the disk within this memory, such as 2GiB.", metavar="SIZE")
@option("--forget-skip-sets", "First delete the skip sets that were found while decoding.", bool)
@json_option
def command(bundle: Path, no_check: bool, budget: str | None, forget_skip_sets: bool, as_json: bool) -> None:
    """Show what a bundle holds: model, methods, memory, provenance, operators.

    \b
    edgespec info demo
    edgespec info demo --json
    edgespec info demo --budget 2GiB
    edgespec info demo --forget-skip-sets
    """
    from edgespec.engine.known import expected_speeds
    from edgespec.engine.strict_probe import tried_rows
    from edgespec.planning.profiles import find_profile
    from edgespec.runtimes.files.bundle import Bundle
    from edgespec.runtimes.files.operators import choose_operators
    from edgespec.runtimes.files.repack import repacked_bytes
    from edgespec.runtimes.files.skip_sets import forget_sets
    from edgespec.runtimes.options import LoadOptions
    from edgespec.runtimes.ort.session import default_threads

    opened = Bundle.open(bundle, check=not no_check)
    manifest = opened.manifest
    if forget_skip_sets:
        click.echo(f"skip sets: {forget_sets(manifest)} files deleted", err=True)
    choice = choose_operators("auto", manifest.target)
    tried = tried_rows(opened, default_threads()) if manifest.target.origin == "edgespec" else None
    operators = {
        "active": choice.kind,
        "reason": choice.reason,
        "exact_rows": True if choice.kind == "native" else tried and tried != "differ",
        "layout": manifest.target.layout,
        "repacked_bytes": sum(repacked_bytes(bundle, part, opened.checked) for part in manifest.models),
        "graphs": {name: graph.operators for name, graph in manifest.target.graphs.items()},
    }
    within = None if budget is None else _within(bundle, manifest, budget)
    profile = find_profile(manifest, LoadOptions())
    speeds = expected_speeds(manifest, profile)
    if as_json:
        data = manifest.model_dump(mode="json")
        value = {"bundle": str(bundle), "operators": operators, "expected_speedups": speeds, "manifest": data}
        emit_json(value if within is None else value | {"within": within.as_dict()})
        return
    console = table_console()
    print_table((), [*_rows(manifest, choice, tried), *([] if within is None else [("budget", within.words())])])
    if manifest.methods:
        _show_methods(console, manifest, profile, speeds)
    told = "; ".join(part.notes or "" for part in manifest.methods.values())
    for note in manifest.provenance.get("notes", []):  # texts, as the manifest was checked
        if note not in told and not (profile and "no speed is predicted" in note):
            console.print(f"note: {note}", markup=False)


def _within(bundle: Path, manifest: Manifest, budget: str) -> Within:
    """Predict how a bundle runs within a budget."""
    from edgespec.engine.encoders import require_writer
    from edgespec.planning.budget import parse_bytes
    from edgespec.planning.speed import within
    from edgespec.planning.streaming import disk_of, seen_reads
    from edgespec.runtimes.options import LoadOptions

    require_writer(manifest)
    limit, use = parse_bytes(budget), LoadOptions().resolve(manifest)
    return within(manifest, use, limit, disk_of(bundle, manifest), seen_reads(manifest))


def _rows(manifest: Manifest, choice: OperatorChoice, tried: StockRows | None) -> list[tuple[str, str]]:
    """List what a bundle is, a row each; ``tried``: how its rows are exact with stock operators here."""
    from edgespec.reports.advice import quality_words
    from edgespec.runtimes.files.kv import state_bytes
    from edgespec.runtimes.files.skip_sets import stored_sets

    facts = manifest.target.facts
    rows: list[tuple[str, str]] = [
        (
            "model",
            f"{manifest.provenance.get('model', '?')}: {facts.architecture}, {facts.parameters / 1e6:.1f}M parameters",
        ),
        (
            "shape",
            f"{facts.layers} layers, hidden {facts.hidden}, {facts.heads}/{facts.kv_heads} heads of {facts.head_dim}, "
            f"vocabulary {facts.vocab}",
        ),
        *_beside(manifest),
        *(("", trait) for trait in manifest.provenance.get("traits", [])),
        *(("differs", line) for line in manifest.provenance.get("approximations", [])),
        ("format", _format(manifest.target)),
        ("context", f"{facts.context} tokens"),
        ("size", _size(manifest)),
        *([] if manifest.is_encoder else [("KV", f"{show_bytes(facts.kv_bytes_per_token)} per token")]),
        *([("sampling", _sampling(manifest.sampling))] if manifest.sampling else []),
        *([("states", f"{show_bytes(state_bytes(facts))}, at every length")] if facts.convolutions else []),
        ("operators", f"{choice.kind} ({choice.reason})"),
        *([("rows", _ROWS[tried])] if choice.kind == "stock" and manifest.target.origin == "edgespec" else []),
        ("devices", _devices(manifest)),
        *(("attention", line) for line in attention_lines(manifest.target.attention)),
        *(("skip sets", f"found so far: {file}") for file in stored_sets(manifest)),
        *([] if manifest.is_encoder else [("parity", _parity(manifest.parity))]),
        *_embeds(manifest),
        *([("quality", found["line"])] if (found := manifest.provenance.get("format_choice")) else []),
        *(("unseen", words) for words in quality_words(manifest.parity).split("; ") if words),
        ("made by", f"edgespec {manifest.edgespec_version}"),
    ]
    source = {key: str(value) for key, value in manifest.provenance.items() if key not in _SHOWN}
    return [*rows, ("provenance", ", ".join(f"{key} {value[:12]}" for key, value in source.items()) or "-")]


def _embeds(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Rows of how a bundle embeds or scores texts."""
    part = manifest.embedding
    if part is None:
        return
    if part.scores:
        yield "scores", f"of pairs of texts, from {manifest.pooling} rows"
    else:
        yield "embeddings", f"{manifest.pooling or 'mean'} of rows{', of length one' if part.normalize else ''}"
    if part.prompts:
        yield "prompts", ", ".join(part.prompts)
    if (found := part.quality) is not None and found.cosine is not None:
        yield "cosine", f"{found.cosine:.5f} with the source on {found.texts} texts, at least {found.cosine_min:.5f}"
    elif found is not None:
        yield "error", f"at most {found.score_max_error:.2g} of a score on {found.texts} texts"


def _beside(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Rows of what guesses for the target, and of a graph that is not ours."""
    from edgespec.drafters.registry import needing

    if manifest.drafter:
        drafter, tapped = manifest.drafter.facts, manifest.target.aux_hidden_layers
        what = f"{drafter.architecture}, {drafter.parameters / 1e6:.2f}M parameters, after layers {tapped}"
        yield "drafter", what + _cut(manifest.drafter)
    if manifest.draft:
        draft = manifest.draft.facts
        what = f"{draft.architecture}, {draft.parameters / 1e6:.2f}M parameters, {draft.layers} layers"
        if manifest.draft.format != manifest.target.format:
            what += f", {manifest.draft.format}"
        if manifest.draft.foreign:
            what += f", exported by {manifest.draft.origin}"
        if manifest.translation:
            what += f", another tokenizer with {manifest.translation.shared} shared tokens"
        yield "draft", what + _cut(manifest.draft)
    if manifest.target.heads:
        yield "heads", _heads(manifest)
    if manifest.target.foreign:
        yield (
            "graph",
            f"exported by {manifest.target.origin}: methods {', '.join(needing('text', 'draft'))} alone, "
            "chains of guesses",
        )


def _skipped(skip: SkipSetPart) -> str:
    if not (skip.high_attention or skip.high_mlp or skip.high_head):
        return f"skips attention {skip.attention}, mlp {skip.mlp}"
    return skip.words


def _show_methods(console: Console, manifest: Manifest, profile: Profile | None, speeds: Mapping[str, float]) -> None:
    """Print a table of the methods, with the speeds that method auto starts from, and their notes."""
    from rich.table import Table

    methods = Table("method", "acceptance", "draft cost", "speed-up", "parts", box=None)
    for name, part in manifest.methods.items():
        measured = " ".join(f"{rate:.2f}" for rate in part.measured[0].acceptance) if part.measured else "-"
        parts = _skipped(part.skip) if part.skip else ", ".join(part.heads)
        if part.threshold is not None:
            parts += f" where {part.threshold:.0%} sure"
        cost = f"{part.draft_cost:.2f}" if part.draft_cost is not None else "-"
        cost = cost if part.first_cost is None else f"{part.first_cost:.2f}, then {cost}"
        how = "assumed" if (part.notes or "").startswith("assumed") else "predicted"
        how = "calibrated" if profile and name in profile.trials else how
        gain = f"{speeds[name]:.2f}x {how}" if name in speeds and (profile or part.predicted_speedup) else "-"
        methods.add_row(name, measured, cost, gain, parts or "-")
    console.print(methods)
    for name, part in manifest.methods.items():
        if part.notes:
            console.print(f"{name}: {part.notes}", markup=False)


_ROWS: dict[StockRows | None, str] = {
    "alone": f"{EXACT}: the same bits in every pass on this machine",
    "pairs": f"{EXACT}: the same bits in every pass on this machine, where a lone row is computed as a pair",
    "differ": f"{NEAR_TIES}: bits differ from pass to pass on this machine",
    None: "tried when it is first opened here",
}
_SHOWN = ("model", "traits", "notes", "approximations", "golden", "format_choice")  # of the provenance, elsewhere


def _devices(manifest: Manifest) -> str:
    """Where it runs, and in which precisions: ``cpu, webgpu (fp32, fp16)``."""
    found: dict[str, list[str]] = {}
    for graph in manifest.target.graphs.values():
        if graph.device != "cpu" and graph.precision not in found.setdefault(graph.device, []):
            found[graph.device].append(graph.precision)
    return ", ".join(["cpu", *(f"{device} ({', '.join(kinds)})" for device, kinds in found.items())])


def _heads(manifest: Manifest) -> str:
    groups = [f"{group.name}{f' ({group.count})' if group.count > 1 else ''}" for group in manifest.target.heads]
    size = manifest.memory.get("weight_bytes", {}).get("heads")
    return ", ".join(groups) + _cut(manifest.target) + (f", {show_bytes(size)}" if size else "")


def _sampling(part: SamplingPart) -> str:
    """Show the sampling of a request that sets none: ``temperature 0.6, top_p 0.95 (the model's own)``."""
    said = part.model_dump(exclude_defaults=True)
    return f"{', '.join(f'{name} {value:g}' for name, value in said.items())} (the model's own)"


def _cut(part: ModelPart) -> str:
    return f", guessing {part.head_vocab.size} of {part.facts.vocab} tokens" if part.head_vocab else ""


def _format(part: ModelPart) -> str:
    words: str = part.format
    if part.format in BLOCK_FORMATS:
        words += f", {part.quantizer}"
    words += f", {part.int8_fraction:.0%} of the layers int8" if part.int8_fraction else ""
    words += f", embedding {part.embedding_format}" if part.embedding_format else ""
    return words + (f", head {part.head_format}" if part.head_format else "")


def _size(manifest: Manifest) -> str:
    """Show the bytes of a bundle, and those that a run with only the high planes skips."""
    size, high = (sum(entry.size for entry in each.files.values()) for each in (manifest, manifest.at_high_precision()))
    planes = f"; {show_bytes(high)} with --precision high, int8's upper 4 bits" if high < size else ""
    return show_bytes(size) + planes


def _parity(parity: dict[str, Any]) -> str:
    if not parity:
        return "not measured"
    against = parity.get("against", "the source")
    return (
        f"top-1 agreement {100 * parity['top1_agreement']:.0f} % with {against} on {parity['positions']} positions, "
        f"perplexity {parity['perplexity']:.2f} ({parity['perplexity_source']:.2f}){high_precision(parity)}"
    )


def high_precision(parity: Mapping[str, Any]) -> str:
    """Describe the divergence of the high planes from the source."""
    if not (high := parity.get("high_precision")):
        return ""
    return (
        f"; with --precision high {100 * high['top1_agreement']:.0f} %, perplexity {high['perplexity']:.2f}, "
        f"divergence {high['kl']:.3g} nats ({parity['kl']:.3g} with both planes)"
    )


@click.command("devices")
@json_option
def devices(as_json: bool) -> None:
    """Show where bundles can run here, and why not elsewhere.

    \b
    edgespec devices
    edgespec devices --json
    """
    from edgespec.runtimes.devices.webgpu import device_states

    found = device_states()
    if as_json:
        emit_json({"devices": [asdict(state) for state in found]})
        return
    for state in found:
        kinds = f" ({', '.join(state.precisions)})" if state.precisions else ""
        click.echo(f"{state.name}: {'usable' if state.usable else 'not usable'}: {state.reason}{kinds}")
        if state.hint:
            click.echo(f"  hint: {state.hint}")
