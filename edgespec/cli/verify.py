"""``edgespec verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    COUNT,
    GroupedCommand,
    bundle_argument,
    emit_json,
    json_option,
    length_option,
    make_settings,
    method_names,
    open_engine,
    option,
    progress,
    prompts_option,
    request_options,
)
from edgespec.drafters.registry import AR
from edgespec.engine.exactness import EXACT, NEAR_TIES

if TYPE_CHECKING:
    from edgespec.reports.proof import MethodProof

_MUST = "the bits are those of the export here, so weights or kernels are others"


@click.command("verify", cls=GroupedCommand)
@bundle_argument
@option(
    "--method",
    "Method to prove; may be repeated.  [default: all of the bundle]",
    dest="methods",
    multiple=True,
    callback=method_names,
)
@prompts_option
@option("--max-prompts", "Maximum number of prompts.", COUNT, 20, dest="limit")
@length_option
@request_options
@json_option
def command(
    bundle: Path, methods: tuple[str, ...], prompts: Path | None, limit: int, as_json: bool, **options: Any
) -> None:
    """Prove that every method of a bundle generates plain decoding's text.

    In strict mode every token must be equal.  Without it, or at a difference, the two logits are
    compared: a near-tie is reported as such.  A graph of another exporter is tried first: if its rows depend on their
    neighbors, near-ties may differ in strict mode too.  With --temperature the proof needs a --seed and --acceptance
    coupled.  Golden vectors must be reproduced where bits are those of the export: by native operators everywhere, by
    stock ones on the same processor and version of ONNX Runtime.  Digests of all files that run are computed again.
    Exits with 1 if something fails.

    \b
    edgespec verify demo
    edgespec verify demo --method self-spec --max-new-tokens 200 --json
    edgespec verify demo --temperature 0.8 --seed 1 --acceptance coupled
    """
    from edgespec.cli.prompts import read_prompts
    from edgespec.planning.budget import show_bytes
    from edgespec.reports.proof import check_golden, check_running, prove, why_free

    if options["no_check"]:
        raise click.UsageError("--no-check: verify needs to compare the files")
    settings = make_settings(None, options)
    settings = settings.changed(ignore_eos=settings.grammar is None)  # one ends where it is complete
    sampling = settings.sampling
    if not settings.accept.lossless:
        raise click.UsageError("--accept gives losslessness away: there is nothing to prove")
    if not sampling.greedy and (sampling.seed is None or sampling.acceptance != "coupled"):
        raise click.UsageError("sampled text can be compared only with --seed N and --acceptance coupled")
    with progress() as report:
        report("load", 0, 1, str(bundle))
        engine = open_engine(bundle, options)
        check_running(engine)  # before the work: a damaged bundle proves nothing
        report("load", 1, 1, str(bundle))
    wanted = list(dict.fromkeys(methods)) or [name for name in engine.methods if name != AR]
    if settings.drafts.proposers and not methods:
        wanted.append("chain")
    for name in wanted:
        engine.choose_for(settings.changed(method=name))
    if engine.strict and not engine.exact_rows:
        click.echo(f"rows of this graph depend on their neighbors here: {NEAR_TIES}", err=True)
    strict = engine.exact_rows
    texts = read_prompts(engine, prompts, limit)
    with progress() as report:
        proofs = prove(engine, texts, settings, wanted, lambda done, of, what: report("verify", done, of, what))
        report("golden", 0, 1, "texts that the export kept")
        same, of = check_golden(engine) if engine.strict else (0, 0)
        report("golden", 1, 1, "texts that the export kept")
    free = why_free(engine)
    running = check_running(engine)  # drafts were loaded since
    equal = all(proof.exact or (not strict and proof.lossless) for proof in proofs)
    passed = equal and (same == of or bool(free)) and not running["unverified"]
    if as_json:
        made: dict[str, Any] = {"bundle": str(bundle), "strict": strict, "passed": passed}
        golden = {"same": same, "of": of, "required": bool(of) and not free, "reason": free}
        rows = [proof.as_dict() for proof in proofs]
        emit_json({**made, "checked": running, "golden": golden, "methods": rows})
    else:
        _show(proofs, strict)
        if of:
            note = "" if same == of else f": {free}, so {NEAR_TIES}" if free else f": DIFFERENT: {_MUST}"
            click.echo(f"golden vectors: {same} of {of} reproduced on this machine{note}")
        kernels = f"native operators {running['native']['version']}" if running["native"] else "stock operators"
        click.echo(f"checked: SHA-256 of {running['files']} files, {show_bytes(running['bytes'])}, {kernels}")
        for reason in running["unverified"]:
            click.echo(f"UNVERIFIED: {reason}")
        click.echo("passed" if passed else "FAILED")
    if not passed:
        sys.exit(1)


def _show(proofs: list[MethodProof], strict: bool) -> None:
    for proof in proofs:
        near = proof.lossless and not strict
        word = EXACT if proof.exact else NEAR_TIES if near else "DIFFERENT"
        click.echo(
            f"{proof.method}: {word}: {proof.equal} of {proof.prompts} prompts equal, {proof.tokens} tokens compared"
        )
        for item in proof.differences:
            kind = "a near-tie" if item.near_tie else "not a near-tie"
            click.echo(
                f"  prompt {item.prompt}, token {item.position}: plain {item.expected}, {proof.method} {item.got}, "
                f"logits differ by {item.gap:.3g} standard deviations: {kind}"
            )
