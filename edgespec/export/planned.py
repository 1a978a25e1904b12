"""A bundle that is not exported yet, from a model's config.json alone: the manifest that an export would write.

No weights are read, no graph is made.  Sizes of weights are exact; what cannot be known before an export is assumed,
said under ``provenance.assumed``, and left out where a number would be a guess: there is no acceptance, no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from edgespec.decoding.target import SkipSet
from edgespec.drafters.registry import EAGLE, METHODS, MTP, SELF_SPEC, SPECULATIVE, drafters_apart, has_exits, needing
from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.architectures.refused import NotCausalLM
from edgespec.export.architectures.sights import limit_images
from edgespec.export.architectures.words import approximations, remedies, traits
from edgespec.export.bundle.model_part import (
    check_coded_keys,
    check_devices,
    check_layers,
    check_operators,
    described_source,
    limited,
    open_draft,
)
from edgespec.export.bundle.writer import GENAI, genai_config
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.drafters.heads import TrainedHeads
from edgespec.export.drafters.mtp import has_mtp, planned_mtp
from edgespec.export.drafters.read import PUBLISHED
from edgespec.export.measuring.plan import PlannedModel, best_vocab_rows, copied_files, entries, first_tokens
from edgespec.export.measuring.planned_heads import assumed_draft, assumed_drafter, planned_heads
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.tokenizers.facts import begin_and_ends, check_sizes, read_if_sound
from edgespec.export.training.options import LAST_HIDDEN
from edgespec.runtimes.files.formats import LEARNT, Attention
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
from edgespec.version import __version__

UNWRITTEN = "a draft"  # stands for one where the options must name one


class PlannedSource:
    """A model that bundles are planned for: its files are opened once, whatever is asked of it.

    Raises:
        ExportError: nothing of that name.
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.path = resolve(model, revision, weights=False)
        self._opened: Checkpoint | None = None

    def architecture(self, context: int | None = None, text_only: bool = False) -> Architecture:
        """Open the model, or the error of an export for an architecture that edgespec does not emit."""
        return _opened(self.path, context, text_only, self._source)

    @property
    def tokenizer_bytes(self) -> int:
        """About the size of a tokenizer.json that was left out when the model was opened; 0 = it is there."""
        return self._opened.tokenizer_bytes if self._opened else 0

    def _source(self, path: Path) -> Checkpoint:
        self._opened = self._opened or described_source(path)
        return self._opened.copied()


def planned_bundle(options: ExportOptions, source: PlannedSource | None = None) -> Manifest:
    """Return what ``edgespec export`` with these options would write; where to is of no use here.

    A draft, a drafter and heads that are not named are such as ``edgespec train`` makes, or as others publish them; the
    first attention is the default, as if it had passed its gate.  Of a hub model no weights are fetched.

    Args:
        options: of the export.
        source: the model that they name, if it is open already.

    Returns a manifest without measurements: ``provenance.planned`` is true, and ``provenance.assumed`` lists what is
    not there yet.

    Raises:
        ExportError: as an export with these options, as far as it can be known.
    """
    name, drafts = options.model, SPECULATIVE in options.methods
    given = replace(options, draft=options.draft or (UNWRITTEN if drafts else None),
                    drafter=UNWRITTEN if set(drafters_apart()) & set(options.methods) else None)  # fmt: skip
    wanted, choice = given.wanted(), options.choice
    layout = options.layout
    source = source or PlannedSource(name, options.revision)
    path, arch = source.path, source.architecture(options.context, options.text_only)
    check_devices(arch, options.devices)
    limit_images(arch, options.image_rows)
    check_layers(wanted, arch.facts)
    check_operators(arch, options.operators)
    trained, assumed = planned_heads(name, options.heads, wanted, arch)
    drafter, tapped = _drafter(arch, wanted, options, choice, assumed)
    cut = options.head_vocab is not None and bool(trained)
    tokens = first_tokens(options.head_vocab or 0, arch, "--head-vocab") if cut else None
    gated = bool(set(needing("layers", "heads", "drafter")) & set(wanted))
    target = PlannedModel(arch, choice, layout, heads=HeadChoice(trained, tokens, tapped), gated=gated)
    target.part = target.part.model_copy(update={"attention": _attention(options.attention, layout, assumed)})
    check_coded_keys(arch.facts, cast(Sequence[Attention], options.attention))
    planes = target.part.planes and not options.devices
    skip = SkipSetPart.of(SkipSet.all_high(arch.facts.layers)) if planes else _skip_set(arch.facts.layers)
    target.for_devices(options.devices, skip if SELF_SPEC in wanted else None)
    draft = _planned_draft(arch, options, assumed) if drafts else None
    models = {"target": target, "draft": draft, "drafter": drafter}
    files, estimated = copied_files(arch.source.path, arch.facts.vocab, source.tokenizer_bytes)
    for model in models.values():
        files |= model.files() if model else {}
    if SELF_SPEC in wanted and not skip.whole:
        assumed.append("self-spec leaves out the middle half of the layers: the set is not searched yet")
    if estimated:
        assumed.append(f"the size of tokenizer.json, from a vocabulary of {arch.facts.vocab} tokens")
    if options.attention and (first := options.attention[0]) not in ("f32", "f16"):
        assumed.append(f"{first} keys and values pass the quality gate")
    tokenizer = _tokenizer(arch)
    if (config := genai_config(target.part, tokenizer, None)) is not None:
        files[GENAI] = len(config)
    weights = {kind: model.weights()[0] for kind, model in models.items() if model}
    if more := target.weights()[1]:
        weights["heads"] = more
    kv = sum(model.arch.facts.kv_bytes_per_token for model in models.values() if model)
    return Manifest(
        schema_version=SCHEMA,
        edgespec_version=__version__,
        target=target.part,
        draft=draft.part if draft else None,
        drafter=drafter.part if drafter else None,
        methods={method: _method(method, trained, skip, arch.facts.layers) for method in wanted},
        tokenizer=tokenizer,
        memory={"weight_bytes": weights, "kv_bytes_per_token": kv},
        provenance={
            "model": path.resolve().name if path.exists() and Path(name).exists() else name,
            "planned": True,
            "assumed": assumed,
            "notes": [*arch.source.notes, *remedies(arch)],
            "traits": traits(arch),
        }
        | ({} if options.draft is None else {"draft": options.draft})
        | ({"approximations": deviations} if (deviations := approximations(arch)) else {}),
        files=entries(files),
    )


def _drafter(
    target: Architecture, wanted: Sequence[str], options: ExportOptions, choice: WeightChoice, assumed: list[str]
) -> tuple[PlannedModel | None, tuple[int, ...]]:
    if not set(needing("drafter")) & set(wanted):
        return None, ()
    arch: Architecture
    if EAGLE in wanted:
        arch, tapped = assumed_drafter(target)
        assumed.append("a drafter as `edgespec train eagle` makes it: it is not trained yet")
    elif (kind := next((PUBLISHED[name] for name in wanted if name in PUBLISHED), None)) and kind.assumed:
        arch, tapped = kind.assumed(target)
        assumed.append(kind.says)
    else:
        arch, tapped = planned_mtp(target), (target.facts.layers,)
    rows = options.draft_vocab
    if rows is None and EAGLE not in wanted:  # whose LM head is its own: what it cannot guess it was not trained for
        rows = best_vocab_rows(target, arch)
    choice = replace(choice, head=choice.drafter_head)
    return PlannedModel(arch, choice, options.layout, "drafter/", rows=rows or None), tapped


def _planned_draft(target: Architecture, options: ExportOptions, assumed: list[str]) -> PlannedModel:
    if options.draft is None:
        arch = assumed_draft(target)
        assumed.append("a draft as `edgespec train draft` makes it: it is not trained yet")
    else:
        arch = open_draft(resolve(options.draft, weights=False), target, options.image_rows, _opened)
    check_sizes(target.facts, arch.facts)
    context = min(target.facts.context, arch.facts.context)
    arch.facts = arch.facts.model_copy(update={"context": context})
    rows = best_vocab_rows(target, arch) if options.draft_vocab is None else options.draft_vocab
    draft = PlannedModel(arch, options.draft_choice, options.layout, "draft/", rows=rows or None)
    draft.for_devices(options.devices, None)
    return draft


def possible_methods(source: PlannedSource, text_only: bool = False) -> tuple[str, ...]:
    """List the methods that a model can have without a draft; an encoder-decoder has no drafter."""
    arch = source.architecture(None, text_only)
    few = arch.facts.layers < 3  # see check_layers
    own = [name for name in needing("text", "layers") if not (few and METHODS[name].searches)]
    if arch.encoder is not None:
        return (*own, *(() if arch.encoder.input_width else LAST_HIDDEN))
    return (*own, *needing("heads"), _possible_drafter(arch))


def possible_drafter(source: PlannedSource, text_only: bool = False) -> str:
    """Return the method whose drafter a model can have.

    ``mtp`` if its config.json speaks of that layer, ``assistant`` of Gemma 4, else ``eagle``.
    """
    return _possible_drafter(source.architecture(None, text_only))


def _possible_drafter(arch: Architecture) -> str:
    if has_mtp(arch):
        return MTP
    return next((name for name, kind in PUBLISHED.items() if kind.usual_for(arch)), EAGLE)


def _opened(
    path: Path,
    context: int | None,
    text_only: bool = False,
    source: Callable[[Path], Checkpoint] = described_source,
) -> Architecture:
    """Open the model, or the error of an export for an architecture that edgespec does not emit."""
    if _holds_graph(path):
        raise UnsupportedModel(
            f"{path}: is an export of optimum, whose graphs cannot be planned", "export it, and plan with the bundle"
        )
    try:
        return limited(architecture(source(path), text_only), context)
    except NotCausalLM:
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


def _attention(names: Sequence[str], layout: Layout, assumed: list[str]) -> AttentionPart | None:
    if unknown := [name for name in names if name not in ATTENTION]:
        raise ExportError(f"unknown attention {unknown[0]!r}", f"attention: {', '.join(ATTENTION)}")
    if not names:
        return None
    if layout == "stock":
        raise ExportError(f"--attention {names[0]} needs native operators", "leave --attention out, or --operators")
    learnt = [name for name in LEARNT if any(ATTENTION[cast(Attention, wanted)].keys == name for wanted in names)]
    return AttentionPart(default=cast(Attention, names[0]), tables=TABLES if learnt else None, learnt=learnt)


def _method(name: str, heads: Mapping[str, TrainedHeads], skip: SkipSetPart, layers: int) -> MethodPart:
    """Its parameters as far as an export does not measure them."""
    if name == SELF_SPEC:
        return MethodPart(skip=skip)
    if METHODS[name].searches:
        return MethodPart(skip=skip if skip.whole else SkipSetPart.of(SkipSet.every_other(layers)))
    if has_exits(name):
        return MethodPart(gamma=8, heads=[group.name for group in heads[name].file.groups])
    if name in heads:
        (group,) = heads[name].file.groups
        return MethodPart(gamma=group.count, heads=[group.name])
    return MethodPart()


def _skip_set(layers: int) -> SkipSetPart:
    """Half of the sub-layers, those in the middle: searched sets of Draft & Verify (arXiv 2309.08168) leave out about
    half, few of them at either end."""
    size = max(1, layers // 2)
    start = max(0, (layers - size) // 2)
    middle = list(range(start, start + size))
    return SkipSetPart(attention=middle, mlp=middle)


def _tokenizer(arch: Architecture) -> TokenizerFacts:
    """Return what the small files say; the tokenizer itself, which may know another EOS, is not opened."""
    folder = arch.source.path
    bos, eos = begin_and_ends(folder, arch.config, None)
    template = "chat_template" in read_if_sound(folder / "tokenizer_config.json") or (folder / TEMPLATE_FILE).is_file()
    return TokenizerFacts(bos=bos[0] if bos else None, eos=eos, chat_template=template)
