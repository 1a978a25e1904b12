"""``edgespec models``."""

from __future__ import annotations

import click

from edgespec.cli.common import emit_json, json_option, table_console
from edgespec.cli.groups import option

VERIFIED_AS = "float32 logits as transformers {}: prefill, with a past, trees, gates; int4 text lossless, every method"


@click.command("models")
@click.argument("model", required=False)
@option("--context", "As for an export: some models choose their rotation by it.", int)
@option("--revision", "Of a hub model.")
@option("--text-only", "Of a model that reads images or sound, its text half.", bool)
@json_option
def command(model: str | None, context: int | None, revision: str | None, text_only: bool, as_json: bool) -> None:
    """Show which architectures can be exported and which are refused, or what a MODEL is.

    MODEL is a local folder, a hub id, or builtin:NAME; its weights are not read, and need not be there.

    \b
    edgespec models
    edgespec models ./Qwen3-0.6B
    edgespec models ./Phi-3.5-mini-instruct --context 4096 --json
    """
    if model is None:
        _show_all(as_json)
    else:
        _show_one(model, context, revision, text_only, as_json)


def _show_all(as_json: bool) -> None:
    from edgespec.export.architectures import ARCHITECTURES, VERIFIED
    from edgespec.export.architectures.refused import REFUSED

    kinds = [
        {"model_type": name, "examples": kind.example, "features": kind.features, "transformers": VERIFIED}
        for name, kind in ARCHITECTURES.items()
    ]
    if as_json:
        emit_json({"architectures": kinds, "verified": VERIFIED_AS.format(VERIFIED), "refused": REFUSED})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("model_type", "for example", "what is special"):
        table.add_column(title, overflow="fold")
    for kind in kinds:
        table.add_row(kind["model_type"], kind["examples"], kind["features"])
    table_console().print(table)
    click.echo(f"verified, each: {VERIFIED_AS.format(VERIFIED)}")
    click.echo("rotary scaling: default, linear, dynamic, yarn, longrope, llama3")
    click.echo("refused:")
    for why, names in REFUSED.items():
        click.echo(f"  {why}: {', '.join(names)}")
    click.echo("anything else: through optimum, with fewer methods (docs/models.md)")


def _show_one(model: str, context: int | None, revision: str | None, text_only: bool, as_json: bool) -> None:
    from edgespec.drafters.registry import needing
    from edgespec.export.architectures.words import traits
    from edgespec.export.bundle.model_part import open_described
    from edgespec.export.optimum.model import ForeignModel, is_foreign
    from edgespec.export.planning.plan import weight_bytes
    from edgespec.export.quantization.weights import WeightChoice
    from edgespec.export.source.source import resolve
    from edgespec.planning.budget import show_bytes
    from edgespec.runtimes.files.formats import FORMATS
    from edgespec.runtimes.files.kv import state_bytes

    path = resolve(model, revision)
    if is_foreign(path):
        foreign = ForeignModel.open(path, context)
        forms = [form for form in FORMATS if form != "w8a8"]
        sizes: dict[str, int] = {
            form: foreign.weight_bytes(WeightChoice.of(form, None, None), "auto")[0] for form in forms
        }
        facts, found = foreign.facts, [f"goes through optimum: methods {', '.join(needing('text', 'draft'))}"]
    else:
        arch = open_described(path, context, text_only)
        facts, sizes = arch.facts, {form: weight_bytes(arch, form) for form in FORMATS}
        found = traits(arch)
    if as_json:
        emit_json({"model": model, "facts": facts.model_dump(mode="json"), "traits": found, "weight_bytes": sizes})
        return
    click.echo(f"{model}: {facts.architecture}, {facts.layers} layers of {facts.hidden}, {facts.heads} heads on "
               f"{facts.kv_heads}, vocabulary {facts.vocab}, context {facts.context}")  # fmt: skip
    for each in found:
        click.echo(f"  {each}")
    click.echo("weights: " + ", ".join(f"{form} {show_bytes(size)}" for form, size in sizes.items()))
    click.echo(f"KV: {show_bytes(facts.kv_bytes_per_token)} a token in float32")
    if states := state_bytes(facts):
        click.echo(f"states: {show_bytes(states)}, at every length of text")
