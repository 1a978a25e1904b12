"""``edgespec models``, ``edgespec pull``, ``edgespec list`` and ``edgespec rm``."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import emit_json, json_option, option, print_table, table_console
from edgespec.planning.budget import show_bytes

VERIFIED_AS = "float32 logits as transformers {}: prefill, with a past, trees, gates; int4 text lossless, every method"


@click.command("models")
@click.argument("model", required=False)
@option("--context", "As for an export: some models choose their rotation by it.", int)
@option("--revision", "Branch, tag or commit of a hub model.")
@option("--text-only", "The text half of a model that reads images or sound.", bool)
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
    from edgespec.export.architectures import ARCHITECTURES, ENCODERS, VERIFIED
    from edgespec.export.architectures.refused import REFUSED
    from edgespec.export.architectures.sights import READ

    kinds = [
        {"model_type": name, "examples": kind.example, "features": kind.features, "transformers": VERIFIED}
        for name, kind in ARCHITECTURES.items()
    ]
    if as_json:
        encoders = [{"model_type": name, "examples": kind.example} for name, kind in ENCODERS.items()]
        found = {"architectures": kinds, "encoders": encoders, "verified": VERIFIED_AS.format(VERIFIED)}
        emit_json(found | {"refused": REFUSED})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("model_type", "for example", "what is special"):
        table.add_column(title, overflow="fold")
    for kind in kinds:
        table.add_row(kind["model_type"], kind["examples"], kind["features"])
    table_console().print(table)
    click.echo(f"verified, each: {VERIFIED_AS.format(VERIFIED)}")
    for sense, types in READ.items():
        click.echo(f"{sense}, of models of the types: {', '.join(sorted(types))}")
    click.echo(f"encoders of texts, for embeddings and rerank: {', '.join(ENCODERS)}")
    click.echo("rotary scaling: default, linear, dynamic, yarn, longrope, llama3")
    click.echo("refused:")
    for why, names in REFUSED.items():
        click.echo(f"  {why}: {', '.join(names)}")
    click.echo("anything else: through transformers, with fewer methods (docs/models.md)")


def _show_one(model: str, context: int | None, revision: str | None, text_only: bool, as_json: bool) -> None:
    from edgespec.drafters.registry import needing
    from edgespec.export.architectures.descriptions import traits
    from edgespec.export.bundle.model_part import open_described
    from edgespec.export.bundle.sizes import weight_bytes
    from edgespec.export.encoder import open_encoder
    from edgespec.export.foreign.model import ForeignModel, is_foreign
    from edgespec.export.options import ExportOptions
    from edgespec.export.quantization.weights import WeightChoice
    from edgespec.export.source.source import resolve
    from edgespec.runtimes.files.formats import FORMATS
    from edgespec.runtimes.files.kv import state_bytes

    path, sizes = resolve(model, revision), dict[str, int]()
    if (encoder := open_encoder(ExportOptions(model, context=context, revision=revision), plans=True)) is not None:
        facts, found = encoder.arch.facts, ["an encoder of texts, for embeddings or scores"]
        sizes = {form: encoder.plan(ExportOptions(model, format=form))[0].end for form in FORMATS}
    elif is_foreign(path):
        foreign = ForeignModel.open(path, context)
        forms = [form for form in FORMATS if form != "w8a8"]
        sizes = {form: foreign.weight_bytes(WeightChoice.of(form, None, None), "auto")["model"] for form in forms}
        facts, found = foreign.facts, [f"goes through {foreign.origin}: methods {', '.join(needing('text', 'draft'))}"]
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
    click.echo(f"KV: {show_bytes(facts.kv_bytes_per_token)} per token in float32")
    if states := state_bytes(facts):
        click.echo(f"states: {show_bytes(states)}, at every length of text")


@click.command("pull")
@click.argument("model", required=False)
@option("--revision", "Branch, tag or commit.  [default: the model's main branch]")
@option("--list", "Show the models that were downloaded before.", bool, dest="listing")
@json_option
def pull(model: str | None, revision: str | None, listing: bool, as_json: bool) -> None:
    """Download a model from the hub, the files that an export needs and no others.

    They are in the hub's cache (HF_HOME), where `edgespec export` finds them without a network.  A token for models
    behind a gate is taken from where the hub's own tools keep it.

    \b
    edgespec pull HuggingFaceTB/SmolLM2-135M-Instruct
    edgespec pull --list
    """
    if listing == (model is not None):
        raise click.UsageError("give a model's hub id, or --list")
    if model is None:
        _list(as_json)
        return
    from edgespec.errors import InvalidRequest
    from edgespec.export.source.source import resolve

    if model.count("/") != 1 or Path(model).exists():
        raise InvalidRequest(f"{model}: expected a hub id, as in OWNER/NAME", "a local model need not be pulled")
    folder = resolve(model, revision)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if as_json:
        emit_json({"model": model, "folder": str(folder), "bytes": size})
    else:
        click.echo(f"{model}: {show_bytes(size)} in {folder}")
        click.echo(f"next: edgespec export {model} --method self-spec")


def _list(as_json: bool) -> None:
    """List the models in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        repos = []
    rows: list[dict[str, Any]] = [
        {"model": repo.repo_id, "bytes": repo.size_on_disk, "folder": str(repo.repo_path)}
        for repo in repos
        if repo.repo_type == "model"
    ]
    if as_json:
        emit_json({"models": rows})
        return
    if not rows:
        click.echo("no model was downloaded yet")
        return
    print_table(("model", "size"), [(row["model"], show_bytes(row["bytes"])) for row in rows])


@click.command("list")
@json_option
def listing(as_json: bool) -> None:
    """Show the bundles that `edgespec run MODEL` has made; commands take their names in place of a folder.

    \b
    edgespec list
    edgespec list --json
    """
    from edgespec.library import made

    found = list(made())
    if as_json:
        emit_json({"bundles": [one.as_dict() for one in found]})
        return
    if not found:
        click.echo("no bundles yet: edgespec run MODEL makes one; bundles of `edgespec export` are not listed")
        return
    rows = [(one.name, show_bytes(one.bytes), f"{date.fromtimestamp(one.used)}", one.model) for one in found]
    print_table(("name", "size", "last used", "model"), rows)


@click.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
def removal(names: tuple[str, ...], as_json: bool) -> None:
    """Remove bundles that `edgespec run MODEL` has made; the models stay.

    \b
    edgespec rm Qwen2.5-0.5B-Instruct
    """
    from edgespec.library import remove

    found = [remove(name) for name in dict.fromkeys(names)]
    if as_json:
        emit_json({"removed": found})
        return
    for one in found:
        click.echo(f"removed {one['name']}, {show_bytes(one['bytes'])}")
