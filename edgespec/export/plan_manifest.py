"""Plan the manifest of a bundle before its export, from a model's config.json, by the export's function over shapes.

No weights are read, no graph is made.  Sizes of weights are exact.  Facts that only an export can measure are assumed,
and listed under ``provenance.assumed``.  Numbers that would be guesses are left out: acceptance and costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.drafters.registry import EAGLE, METHODS, MTP, SELF_SPEC, SPECULATIVE, drafters_apart, has_exits, needing
from edgespec.errors import ExportError, IncompatibleDraft, UnsupportedModel
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.architectures.descriptions import approximations, remedies, traits
from edgespec.export.architectures.refused import NotCausalLM
from edgespec.export.assumed import assumed_draft, assumed_drafter, planned_heads
from edgespec.export.bundle.drafter import plan_drafter
from edgespec.export.bundle.model_part import check_coded_keys, described_source, limited, open_draft
from edgespec.export.bundle.sizes import TOKENIZER, copied_files, entries, model_bytes, model_files
from edgespec.export.bundle.source_model import DRAFT as DRAFT_FOLDER
from edgespec.export.bundle.writer import GENAI, genai_config
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.head_choice import check_size, cut_draft
from edgespec.export.drafters.heads import TrainedHeads
from edgespec.export.drafters.mtp import has_mtp, planned_mtp
from edgespec.export.drafters.read import PUBLISHED
from edgespec.export.emit.device import with_device_graphs
from edgespec.export.models import Parts, check_target, is_gated, make_manifest, open_models, weight_bytes
from edgespec.export.onnx_model import EmittedModel
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.tokenizers.facts import begin_and_ends, read_if_sound, sizes_differ
from edgespec.export.tokenizers.translated import TARGET_TOKENS
from edgespec.export.training.options import LAST_HIDDEN
from edgespec.planning.vocab_pruning import TYPICAL
from edgespec.runtimes.files.formats import LEARNT, Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import (
    AttentionPart,
    Layout,
    Manifest,
    MethodPart,
    SkipSetPart,
    TokenizerFacts,
    TranslationPart,
)
from edgespec.runtimes.text.chat import TEMPLATE_FILE
from edgespec.runtimes.text.translation import Translation

UNWRITTEN = "a draft"  # a name for one where the options must name one


class PlannedSource:
    """A model that bundles are planned for: its files are opened only once.

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
        """About the size of a tokenizer.json that was left out when the model was opened; 0 = it exists."""
        return self._opened.tokenizer_bytes if self._opened else 0

    def _source(self, path: Path) -> Checkpoint:
        self._opened = self._opened or described_source(path)
        return self._opened.copied()


def plan_bundle(options: ExportOptions, source: PlannedSource | None = None) -> Manifest:
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
    options = options.placed()
    given = replace(options, draft=options.draft or (UNWRITTEN if SPECULATIVE in options.methods else None),
                    drafter=UNWRITTEN if set(drafters_apart()) & set(options.methods) else None)  # fmt: skip
    methods, choice, layout = given.wanted(), options.choice, options.layout
    source = source or PlannedSource(options.model, options.revision)
    shapes = Shapes(options, source)
    arch, assumed = shapes.target.arch, shapes.assumed
    models = open_models(options, methods, shapes)
    attention = _attention(options.attention, layout, assumed)
    check_coded_keys(arch.facts, cast(Sequence[Attention], options.attention))

    target = shapes.target.plan(choice, layout, gated=is_gated(methods))
    draft = (
        models.draft.plan(options.draft_choice, layout, draft=True) if isinstance(models.draft, EmittedModel) else None
    )
    drafter = None if models.drafter is None else plan_drafter(models.drafter, choice, layout)
    skip = _skip_set(arch.facts.layers, target.part.planes and not options.devices)
    written = target.part.model_copy(update={"attention": attention})
    drafted = None if draft is None else draft.part
    for device in options.devices:
        written = with_device_graphs(written, device, skip if SELF_SPEC in methods else None, "")
        drafted = None if drafted is None else with_device_graphs(drafted, device, None, DRAFT_FOLDER)

    tokenizer = _tokenizer(arch)
    files, estimated = copied_files(arch.source.path, arch.facts.vocab, source.tokenizer_bytes)
    parts = Parts(written, drafted, None if drafter is None else drafter.part)
    for plan, part in zip((target, draft, drafter), parts, strict=True):
        files |= {} if plan is None or part is None else model_files(plan, part)
    translation = None
    if shapes.translated and drafted is not None and models.draft is not None:
        vocab, name = drafted.facts.vocab, DRAFT_FOLDER + TARGET_TOKENS
        translation = TranslationPart(matching="strings", tokens=name, shared=0)
        size = copied_files(models.draft.source.path, vocab)[0][TOKENIZER]
        files |= {DRAFT_FOLDER + TOKENIZER: size, translation.tokens: 4 * vocab}
    if (config := genai_config(written, tokenizer, None)) is not None:
        files[GENAI] = len(config)
    if SELF_SPEC in methods and not skip.whole:
        assumed.append("self-spec leaves out the middle half of the layers: the set is not searched yet")
    if estimated:
        assumed.append(f"the size of tokenizer.json, from a vocabulary of {arch.facts.vocab} tokens")
    if attention is not None and attention.default not in ("f32", "f16"):
        assumed.append(f"{attention.default} keys and values pass the quality gate")
    weights = weight_bytes(
        model_bytes(target),
        None if draft is None else model_bytes(draft),
        None if drafter is None else drafter.weight_bytes,
    )
    described = {name: _method(name, models.heads.trained, skip, arch.facts.layers) for name in methods}
    provenance = _provenance(options, source.path, arch, assumed)
    return make_manifest(
        models, parts, described, tokenizer, weights, provenance, files=entries(files), translation=translation
    )


class Shapes:
    """The models of options, only as shapes: those that do not exist yet are assumed.

    Attributes:
        target: checked against the options.
        assumed: sentences that describe the assumptions.
        translated: whether the draft has another tokenizer.
    """

    def __init__(self, options: ExportOptions, source: PlannedSource) -> None:
        self.options, self.assumed, self.translated = options, list[str](), False
        arch = source.architecture(options.context, options.text_only)
        check_target(arch, options)
        self.target = EmittedModel(arch)

    def draft(self) -> EmittedModel:
        """Open the draft's config.json, or assume one as training makes it."""
        options, target = self.options, self.target.arch
        if options.draft is None:
            arch = assumed_draft(target)
            self.assumed.append("a draft as `edgespec train draft` makes it: it is not trained yet")
        else:
            arch = open_draft(resolve(options.draft, weights=False), target, options.image_rows, _opened)
        if why := sizes_differ(target.facts, arch.facts):
            if target.encoder is not None:
                raise IncompatibleDraft(why, "use a draft of the same model family, with the same tokenizer")
            self.assumed.append(f"the draft has another tokenizer: {why}")
            self.translated = True
        return EmittedModel(arch)

    def heads(self, methods: Sequence[str]) -> dict[str, TrainedHeads]:
        """Describe the heads of methods; see ``planned_heads``."""
        found, assumed = planned_heads(self.options.model, self.options.heads, methods, self.target.arch)
        self.assumed += assumed
        return found

    def drafter(self, methods: Sequence[str]) -> Drafter | None:
        """Assume the drafter of methods: one as it is published, trained, or inside the checkpoint."""
        target = self.target.arch
        if not set(needing("drafter")) & set(methods):
            return None
        arch: Architecture
        if EAGLE in methods:
            arch, tapped = assumed_drafter(target)
            self.assumed.append("a drafter as `edgespec train eagle` makes it: it is not trained yet")
        elif (kind := next((PUBLISHED[name] for name in methods if name in PUBLISHED), None)) and kind.assumed:
            arch, tapped = kind.assumed(target)
            self.assumed.append(kind.says)
        else:
            arch, tapped = planned_mtp(target), (target.facts.layers,)
        return Drafter(arch, tapped, None)

    def tokens(self, size: int, vocab: int, option: str, translation: Translation | None = None) -> NDArray[np.int64]:
        """Stand for the tokens of a cut LM head, which are not chosen yet."""
        check_size(size, vocab, option)
        return np.arange(size)

    def coverage(self, size: int, translation: Translation | None = None) -> float:
        """Assume how much of a text the ``size`` first ids are."""
        return TYPICAL[size]

    def cut(self, drafter: Drafter, tokens: NDArray[np.int64]) -> Drafter:
        """Let a drafter score only some tokens, whichever LM head it has."""
        cut_draft(drafter.arch, tokens)
        return replace(drafter, tokens=tokens)


def _provenance(options: ExportOptions, path: Path, arch: Architecture, assumed: list[str]) -> dict[str, Any]:
    deviations = approximations(arch)
    return {
        "model": path.resolve().name if path.exists() and Path(options.model).exists() else options.model,
        "planned": True,
        "assumed": assumed,
        "notes": [*arch.source.notes, *remedies(arch)],
        "traits": traits(arch),
        **({} if options.draft is None else {"draft": options.draft}),
        **({"approximations": deviations} if deviations else {}),
    }


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
        from edgespec.export.foreign.model import find_graph, is_foreign, unsupported
        from edgespec.export.foreign.write import exporter_missing
        from edgespec.export.source.stored import read_object as described

        if not is_foreign(path):
            raise
        missing = exporter_missing()
        if missing and find_graph(path) is None:
            raise unsupported(path, described(path / "config.json", ""), missing) from error
        raise UnsupportedModel(
            f"{error.message}; others go through transformers, whose graphs cannot be planned",
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


def _skip_set(layers: int, planes: bool) -> SkipSetPart:
    """Assume high planes of all layers where matrices have ``planes``, else half of the sub-layers, in the middle.

    Searched sets of Draft & Verify (arXiv 2309.08168) leave out about half, few of them at either end.
    """
    if planes:
        return SkipSetPart.of(SkipSet.all_high(layers))
    size = max(1, layers // 2)
    start = max(0, (layers - size) // 2)
    middle = list(range(start, start + size))
    return SkipSetPart(attention=middle, mlp=middle)


def _tokenizer(arch: Architecture) -> TokenizerFacts:
    """Return facts from the tokenizer's small files; the tokenizer, which may have another EOS, is not opened."""
    folder = arch.source.path
    bos, eos = begin_and_ends(folder, arch.config, None)
    template = "chat_template" in read_if_sound(folder / "tokenizer_config.json") or (folder / TEMPLATE_FILE).is_file()
    return TokenizerFacts(bos=bos[0] if bos else None, eos=eos, chat_template=template)
