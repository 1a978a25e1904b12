"""A bundle that is not exported yet, from a model's config.json alone: the manifest that an export would write.

No weights are read, no graph is made.  Sizes of weights are exact; what cannot be known before an export is assumed,
said under ``provenance.assumed``, and left out where a number would be a guess: there is no acceptance, no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from edgespec import __version__
from edgespec.drafters.registry import EAGLE, MTP, SELF_SPEC, SPECULATIVE, drafters_apart, needing
from edgespec.errors import BundleError, ExportError, IncompatibleDraft, UnsupportedModel
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.refused import NotText
from edgespec.export.architectures.words import approximations, remedies, traits
from edgespec.export.bundle.model_part import (
    check_coded_keys,
    check_devices,
    check_layers,
    check_operators,
    open_described,
)
from edgespec.export.bundle.writer import GENAI, genai_config
from edgespec.export.drafters.mtp import has_mtp, planned_mtp
from edgespec.export.drafters.read import PUBLISHED
from edgespec.export.measuring.plan import PlannedModel, copied_files, entries, paying_rows
from edgespec.export.measuring.planned_heads import (
    PlannedHeads,
    assumed_draft,
    assumed_drafter,
    planned_heads,
)
from edgespec.export.measuring.skip_search import first_skip_set
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import PADDING
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import LEARNT, Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import (
    SCHEMA,
    AttentionPart,
    Layout,
    Manifest,
    MethodPart,
    SkipSetPart,
    TokenizerFacts,
)
from edgespec.runtimes.text.chat import TEMPLATE_FILE
from edgespec.runtimes.text.special import read_object

UNWRITTEN = "a draft"  # stands for one where the options must name one


def planned_bundle(  # noqa: PLR0913 - ExportOptions asks for an output, and has much that a plan would ignore
    model: str | Path,
    *,
    form: Format = "int4",
    head_format: Format | None = None,
    methods: Sequence[str] = (),
    draft: str | None = None,
    context: int | None = None,
    layout: Layout = "native",
    quantizer: str | None = None,
    heads: Sequence[str] = (),
    head_vocab: int | None = None,
    draft_vocab: int | None = None,
    attention: Sequence[str] = (),
    devices: Sequence[DeviceName] = (),
    revision: str | None = None,
    text_only: bool = False,
) -> Manifest:
    """Return what ``edgespec export`` with these options would write.

    Args:
        model: a folder, which may have no weights; a .gguf file; a hub id, of which no weights are fetched;
            ``builtin:NAME``.
        form, head_format, quantizer: of the weights.
        methods: beside ar and ngram.
        draft: for speculative, named as ``model``; None = one as ``edgespec train draft`` makes.
        context: most tokens; None = the model's limit.
        layout: of the weights.
        heads: folders of trained heads; methods without get those that ``edgespec train`` makes.
        head_vocab, draft_vocab: rows of a cut LM head, as in ``ExportOptions``.
        attention: the first is the default, as if it had passed its gate.
        devices: with graphs of their own.
        revision: of a hub model.
        text_only: of a model that reads more than text, its text half.

    Returns a manifest without measurements: ``provenance.planned`` is true, and ``provenance.assumed`` lists what is
    not there yet.

    Raises:
        ExportError: as an export with these options, as far as it can be known.
    """
    name = str(model)
    speculative = UNWRITTEN if SPECULATIVE in methods else None
    options = ExportOptions(name, Path(), methods, form, quantizer, head_format, draft or speculative, context,
                            head_vocab=head_vocab, draft_vocab=draft_vocab, devices=devices,
                            drafter=UNWRITTEN if set(drafters_apart()) & set(methods) else None)  # fmt: skip
    wanted, choice = options.wanted(), WeightChoice.of(form, quantizer, head_format)
    path = resolve(name, revision, weights=False)
    arch = _opened(path, context, text_only)
    check_devices(arch, devices)
    check_layers(wanted, arch.facts)
    check_operators(arch, layout)
    its_heads = planned_heads(name, heads, wanted, arch.facts)
    assumed = list(its_heads.assumed)
    skip = _skip_set(arch.facts.layers)
    files, estimated = copied_files(arch.source.path, arch.facts.vocab)
    target = PlannedModel(arch, choice, layout, devices, cut=head_vocab if its_heads.groups else None)
    drafter: PlannedModel | None = None
    if set(needing("drafter")) & set(wanted):
        its_own: Architecture
        rows: int | None = None
        if EAGLE in wanted:
            its_own, tapped = assumed_drafter(arch)
            rows = draft_vocab or None  # its LM head is its own: what it cannot guess it was not trained for
            assumed.append("a drafter as `edgespec train eagle` makes it: it is not trained yet")
        else:
            if (kind := next((PUBLISHED[name] for name in wanted if name in PUBLISHED), None)) is not None:
                its_own, tapped = kind.assumed(arch)
                assumed.append(kind.says)
            else:
                its_own, tapped = planned_mtp(arch), (arch.facts.layers,)
            rows = paying_rows(arch, its_own) if draft_vocab is None else draft_vocab or None
        drafter = PlannedModel(its_own, replace(choice, head=choice.drafter_head), layout, (), rows, "drafter/")
        drafter.as_draft()
        files |= drafter.files()
        its_heads = replace(its_heads, tapped=tapped)
    target.with_heads(its_heads, gated=bool(set(needing("layers", "heads", "drafter")) & set(wanted)))
    target.part = target.part.model_copy(update={"attention": _attention(attention, layout, assumed)})
    check_coded_keys(arch.facts, cast(Sequence[Attention], attention))
    target.for_devices(skip if SELF_SPEC in wanted else None)
    files |= target.files()
    other: PlannedModel | None = None
    if speculative is not None:
        small = _draft(draft, arch, assumed)
        cut = paying_rows(arch, small) if draft_vocab is None else draft_vocab or None
        other = PlannedModel(small, choice, layout, devices, cut, "draft/")
        other.as_draft()
        other.for_devices(None)
        files |= other.files()
    if SELF_SPEC in wanted:
        assumed.append("self-spec leaves out the middle half of the layers: the set is not searched yet")
    if estimated:
        assumed.append(f"the size of tokenizer.json, from a vocabulary of {arch.facts.vocab} tokens")
    if attention and (first := attention[0]) not in ("f32", "f16"):
        assumed.append(f"{first} keys and values pass the quality gate")
    tokenizer = _tokenizer(arch)
    if (config := genai_config(target.part, tokenizer, None)) is not None:
        files[GENAI] = len(config)
    kv = sum(model.arch.facts.kv_bytes_per_token for model in (target, other, drafter) if model)
    return Manifest(
        schema_version=SCHEMA,
        edgespec_version=__version__,
        target=target.part,
        draft=other.part if other else None,
        drafter=drafter.part if drafter else None,
        methods={method: _method(method, its_heads, skip, arch.facts.layers) for method in wanted},
        tokenizer=tokenizer,
        memory={"weight_bytes": _weights(target, other, drafter), "kv_bytes_per_token": kv},
        provenance={
            "model": path.resolve().name if path.exists() and Path(name).exists() else name,
            "planned": True,
            "assumed": assumed,
            "notes": [*arch.source.notes, *remedies(arch)],
            "traits": traits(arch),
        }
        | ({} if draft is None else {"draft": draft})
        | ({"approximations": deviations} if (deviations := approximations(arch)) else {}),
        files=entries(files),
    )


def possible_drafter(model: str, revision: str | None = None, text_only: bool = False) -> str:
    """Return the method whose drafter a model can have.

    ``mtp`` if its config.json speaks of that layer, ``assistant`` of Gemma 4, else ``eagle``.

    Raises:
        ExportError: as ``planned_bundle``.
    """
    arch = _opened(resolve(model, revision, weights=False), None, text_only)
    if has_mtp(arch):
        return MTP
    return next((name for name, kind in PUBLISHED.items() if kind.usual_for(arch)), EAGLE)


def _opened(path: Path, context: int | None, text_only: bool) -> Architecture:
    """Open the model, or the error of an export for an architecture that edgespec does not emit."""
    if _holds_graph(path):
        raise UnsupportedModel(
            f"{path}: is an export of optimum, whose graphs cannot be planned", "export it, and plan with the bundle"
        )
    try:
        return open_described(path, context, text_only)
    except NotText:
        raise
    except UnsupportedModel as error:
        from edgespec.export.optimum.model import find_graph, is_foreign, unsupported
        from edgespec.export.optimum.write import optimum_missing
        from edgespec.export.source.stored import read_object as described

        if not is_foreign(path):
            raise
        missing = optimum_missing()
        if missing and find_graph(path) is None:
            raise unsupported(path, described(path / "config.json", ""), missing) from error
        raise UnsupportedModel(
            f"{error.message}; others go through optimum, whose graphs cannot be planned",
            "export it, and plan with the bundle",
        ) from error


def _holds_graph(path: Path) -> bool:
    """Whether an export would take the graph of a folder, because it has no weights (``is_foreign``)."""
    graphs = [*path.glob("*.onnx"), *path.glob("onnx/*.onnx")]
    return bool(graphs) and not any(path.glob("*.safetensors"))


def _draft(name: str | None, target: Architecture, assumed: list[str]) -> Architecture:
    """Return the draft, with no more context than the target."""
    if name is None:
        draft = assumed_draft(target)
        assumed.append("a draft as `edgespec train draft` makes it: it is not trained yet")
    else:
        draft = _opened(resolve(name, weights=False), None, bool(target.text_half_of))
    sizes = target.facts.vocab, draft.facts.vocab
    if abs(sizes[0] - sizes[1]) > PADDING:
        raise IncompatibleDraft(
            f"the draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}",
            "use a draft of the same model family, with the same tokenizer",
        )
    context = min(target.facts.context, draft.facts.context)
    draft.facts = draft.facts.model_copy(update={"context": context})
    return draft


def _attention(names: Sequence[str], layout: Layout, assumed: list[str]) -> AttentionPart | None:
    """How keys and values are kept, as if what was asked for had passed its gate."""
    if unknown := [name for name in names if name not in ATTENTION]:
        raise ExportError(f"unknown attention {unknown[0]!r}", f"attention: {', '.join(ATTENTION)}")
    if not names:
        return None
    if layout == "stock":
        raise ExportError(f"--attention {names[0]} needs native operators", "leave --attention out, or --operators")
    learnt = [name for name in LEARNT if any(ATTENTION[cast(Attention, wanted)].keys == name for wanted in names)]
    return AttentionPart(default=cast(Attention, names[0]), tables=TABLES if learnt else None, learnt=learnt)


def _method(name: str, heads: PlannedHeads, skip: SkipSetPart, layers: int) -> MethodPart:
    """Its parameters as far as an export does not measure them."""
    if name == SELF_SPEC:
        return MethodPart(skip=skip)
    if name == "swift":
        first = first_skip_set(layers)
        return MethodPart(skip=SkipSetPart(attention=list(first.attention), mlp=list(first.mlp)))
    if name == "paradecode":
        return MethodPart(gamma=8, heads=[group.name for group in heads.groups[name]])
    if name in heads.groups:
        (group,) = heads.groups[name]
        return MethodPart(gamma=group.count, heads=[group.name])
    return MethodPart()


def _skip_set(layers: int) -> SkipSetPart:
    """Half of the sub-layers, those in the middle: searched sets of Draft & Verify (arXiv 2309.08168) leave out about
    half, few of them at either end."""
    size = max(1, layers // 2)
    start = max(0, (layers - size) // 2)
    middle = list(range(start, start + size))
    return SkipSetPart(attention=middle, mlp=middle)


def _weights(target: PlannedModel, draft: PlannedModel | None, drafter: PlannedModel | None) -> dict[str, int]:
    """As in an export's manifest."""
    alone, heads = target.weights()
    others = {"draft": draft, "drafter": drafter}
    found = {"target": alone} | {name: model.weights()[0] for name, model in others.items() if model}
    return found | ({"heads": heads} if heads else {})


def _tokenizer(arch: Architecture) -> TokenizerFacts:
    """Return what the small files say; the tokenizer itself, which may know another EOS, is not opened."""
    folder = arch.source.path

    def read(name: str) -> dict[str, Any]:
        try:
            return read_object(folder / name, infinite=True)
        except BundleError:
            return {}

    def ids(value: Any) -> list[int]:
        return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0]

    generation, config = read("generation_config.json"), {**read("config.json"), **arch.config}
    bos = ids(generation.get("bos_token_id")) or ids(config.get("bos_token_id"))
    eos = ids(generation.get("eos_token_id")) or ids(config.get("eos_token_id"))
    template = "chat_template" in read("tokenizer_config.json") or (folder / TEMPLATE_FILE).is_file()
    return TokenizerFacts(bos=bos[0] if bos else None, eos=eos, chat_template=template)
