"""An export from beginning to end: open, write, compare, measure, search, close."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec import __version__
from edgespec.cost import WORTH
from edgespec.errors import ExportError
from edgespec.export.acceptance import ChainScorer
from edgespec.export.architectures import Architecture
from edgespec.export.attention import check_attention, prepare_attention
from edgespec.export.calibrate import chosen_levels
from edgespec.export.calibration_text import MEASURED_TOKENS, MIN_TOKENS, quantizer_texts, read_calibration
from edgespec.export.head_choice import KINDS, HeadChoice, choose_heads, cut_draft
from edgespec.export.head_methods import measure_heads
from edgespec.export.head_vocab import frequent_tokens, write_tokens
from edgespec.export.model import WrittenModel, open_model, write_model
from edgespec.export.parity import parity_report
from edgespec.export.plan import describe_export
from edgespec.export.skip_search import Candidate, SkipSearch, StepCosts, measure_steps
from edgespec.export.skip_sets import first_skip_set, read_skip_set
from edgespec.export.source import resolve
from edgespec.export.tokenizer import check_same_vocabulary, tokenizer_facts
from edgespec.export.weights import WeightChoice
from edgespec.export.writer import copy_tokenizer, refuse_existing, staged_folder, write_manifest
from edgespec.runtimes.manifest import (
    METHODS,
    SCHEMA,
    Format,
    Layout,
    Manifest,
    Measured,
    MethodPart,
    ModelPart,
    SkipSetPart,
)
from edgespec.runtimes.operators import Wanted, choose_operators
from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import Slot, open_slot
from edgespec.runtimes.text import TextCodec

ALWAYS = ("ar", "ngram")
GATED = ("self-spec", "swift", *KINDS)  # methods that leave layers out of a pass
GAMMA = 5  # length of the measured chains: acceptance is known up to here
POSITIONS, HEAD_POSITIONS = 40, 160
TREE_ROWS = (9, 17)  # rows of the passes that verify trees
Progress = Callable[[str, int, int, str], None]  # stage, done, of, detail


@dataclass(frozen=True)
class ExportOptions:
    """What ``edgespec export`` asks for.

    Attributes:
        model: folder, hub id or ``builtin:NAME``. output: the bundle's folder. methods: decoding methods to prepare;
        ar and ngram are always there. format: weight format of target and draft. quantizer: how int4 and int8 levels
        are chosen; None = mse. head_format: of the LM head and the embedding tied to it; None = ``format``. draft: the
        draft model, for ``speculative``. context: most tokens of a sequence; None = the model's own limit. calibration:
        text that awq and gptq calibrate on, and that parity, acceptance and the search are measured on; None = the
        model's or the built-in one. skip_set: a JSON
        file with a published skip set, instead of the search. trials: proposals of the skip-set search. seed: of the
        search. threads: of the measurements. overwrite: replace an older bundle. revision: of a hub model.
        keep_search: folder for the state of an interrupted search. operators: whose layout the weights get: native
        unless ``stock``; either kind can run them, after a conversion.  attention: how keys may be kept; the first one
        that passes its quality gate becomes the default; none = float16.  heads: folders of trained heads, for medusa,
        blockwise and paradecode.  head_vocab, draft_vocab: rows of the heads' and of the draft's LM head: the most
        frequent tokens of the calibration text; None = all.
    """

    model: str
    output: Path
    methods: Sequence[str] = ()
    format: Format = "int4"
    quantizer: str | None = None
    head_format: Format | None = None
    draft: str | None = None
    context: int | None = None
    calibration: Path | None = None
    skip_set: Path | None = None
    trials: int = 64
    seed: int = 0
    threads: int | None = None
    overwrite: bool = False
    revision: str | None = None
    keep_search: Path | None = None
    operators: Wanted = "auto"
    attention: Sequence[str] = ()
    heads: Sequence[str] = ()
    head_vocab: int | None = None
    draft_vocab: int | None = None

    def wanted(self) -> list[str]:
        """All methods of the bundle, in the usual order.

        Raises:
            ExportError: an unknown method, or options that do not fit together.
        """
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ExportError(f"unknown method {unknown[0]!r}", f"methods: {', '.join(METHODS)}")
        methods = [name for name in METHODS if name in self.methods or name in ALWAYS]
        if "speculative" in methods and self.draft is None:
            raise ExportError("method speculative needs a draft model", "add --draft MODEL2")
        if self.draft is not None and "speculative" not in methods:
            raise ExportError("--draft was given, but not --method speculative", "add --method speculative")
        if self.skip_set is not None and "self-spec" not in methods:
            raise ExportError("--skip-set was given, but not --method self-spec", "add --method self-spec")
        if self.draft_vocab is not None and "speculative" not in methods:
            raise ExportError("--draft-vocab was given, but not --method speculative", "add --method speculative")
        if self.head_vocab is not None and not set(KINDS) & set(methods):
            raise ExportError("--head-vocab was given, but no method with heads", f"methods: {', '.join(KINDS)}")
        return methods


@dataclass
class Exporter:
    """One export; ``run`` does it, ``plan`` only says what it would do."""

    options: ExportOptions
    progress: Progress = field(default=lambda stage, done, of, detail: None)

    def __post_init__(self) -> None:
        options = self.options
        self.methods = options.wanted()
        self.choice = WeightChoice.of(options.format, options.quantizer, options.head_format)
        self.arch = open_model(resolve(options.model, options.revision), options.context)
        if "swift" in self.methods and self.arch.facts.layers < 3:
            raise ExportError(
                f"swift leaves out layers between first and last, but the model has {self.arch.facts.layers} layers",
                "use another method",
            )
        self.codec = TextCodec(self.arch.source.path)
        self.draft: Architecture | None = None
        if options.draft is not None:
            self.draft = open_model(resolve(options.draft), None)
            check_same_vocabulary(self.arch, self.draft, self.codec, TextCodec(self.draft.source.path))
            self.draft.facts = _limited(self.draft, self.arch.facts.context)
        heads = choose_heads(options.model, options.heads, self.methods, self.arch, self.codec)
        self.given_skip = read_skip_set(options.skip_set, self.arch.facts.layers) if options.skip_set else None
        self.text, self.text_name = read_calibration(options.calibration, self.arch.source.path, self.codec)
        self.heads = HeadChoice(heads, self._frequent(options.head_vocab, self.arch, "--head-vocab"))
        self.heads.extend(self.arch)
        self.draft_tokens = self._frequent(options.draft_vocab, self.draft or self.arch, "--draft-vocab")
        self.attention = check_attention(options.attention, options.operators, len(self.codec.encode(self.text)))

    def plan(self) -> dict[str, Any]:
        """What ``run`` would write, as a JSON object."""
        refuse_existing(self.options.output, self.options.overwrite)
        return self._described()

    def run(self) -> Manifest:
        """Write the bundle; returns its manifest.

        Raises:
            ExportError: anything about the source, the options or the disk; nothing is left behind.
        """
        options = self.options
        gated = bool(set(GATED) & set(self.methods))
        with staged_folder(options.output, options.overwrite) as folder:
            scored = None if self.heads.tokens is None else write_tokens(folder, "", self.heads.tokens)
            kind = {"gated": gated, "plan": self.heads.plan, "head_vocab": scored}
            written = self._write(folder, self.arch, "target", **kind)
            draft_part = self._write_draft(folder)
            copy_tokenizer(self.arch.source.path, folder)
            self.progress("weights", 1, 1, "written")
            operators = choose_operators(options.operators, written.part)
            slot = open_slot(Model(folder, written.part, operators.graph(written.part, strict=True), options.threads))
            tokens = self._tokens(min(MEASURED_TOKENS, self.arch.facts.context // 2))
            of = 2 * self.arch.facts.layers
            parity = parity_report(
                self.arch,
                written.errors,
                slot,
                tokens,
                lambda done: self.progress("parity", done, of, "source in fp32"),
            )
            methods, costs = self._measure(folder, slot, tokens, draft_part)
            target = self._prepare_attention(folder, written.part)
            return write_manifest(
                folder,
                Manifest(
                    schema_version=SCHEMA,
                    edgespec_version=__version__,
                    target=target,
                    draft=draft_part,
                    methods=methods,
                    tokenizer=tokenizer_facts(self.arch, self.codec),
                    parity=parity | {"text": self.text_name, "text_sha256": _digest(self.text)},
                    cost=costs.as_dict() | {"threads": slot.model.threads, "depth": len(tokens)},
                    memory=self._memory(written.part, draft_part),
                    provenance=self._provenance(),
                ),
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _write_draft(self, folder: Path) -> ModelPart | None:
        if self.draft is None:
            return None
        (folder / "draft").mkdir()
        kind: dict[str, Any] = {"draft": True, "prefix": "draft/"}
        if self.draft_tokens is not None:
            kind["head_vocab"] = write_tokens(folder / "draft", "draft/", self.draft_tokens)
            kind["plan"] = cut_draft(self.draft, self.draft_tokens)
        return self._write(folder / "draft", self.draft, "draft", **kind).part

    def _frequent(self, size: int | None, arch: Architecture, option: str) -> NDArray[np.int64] | None:
        """The tokens of a cut LM head, [size]."""
        if size is None:
            return None
        always = tokenizer_facts(self.arch, self.codec).eos
        return frequent_tokens(self.codec.encode(self.text), size, arch.facts.vocab, always, option)

    def _layout(self) -> Layout:
        return "stock" if self.options.operators == "stock" else "native"

    def _write(self, folder: Path, arch: Architecture, what: str, **kind: Any) -> WrittenModel:
        choice, of = self.choice, 2 * arch.facts.layers
        layout = self._layout()
        self.progress("weights", 0, 1, what)
        if choice.quantizer is None:
            return write_model(folder, arch, choice.format, layout=layout, **kind)

        def report(done: int) -> None:
            self.progress("quantize", done, of, f"{what}, on {texts.size} tokens")

        texts = quantizer_texts(self.codec, self.text, arch.facts.context)
        with chosen_levels(arch, choice.quantizer, choice.bits(arch), texts, folder, report) as chosen:
            return write_model(folder, arch, choice.format, head=choice.head, chosen=chosen, layout=layout, **kind)

    def _prepare_attention(self, folder: Path, part: ModelPart) -> ModelPart:
        """The target's entry with what was learnt and measured of other attentions."""
        if not self.attention:
            return part
        made = prepare_attention(
            folder,
            part,
            self.attention,
            self.codec.encode(self.text),
            self.options.threads,
            lambda done, of, what: self.progress("attention", done, of, what),
        )
        text = {"text": self.text_name, "text_sha256": _digest(self.text)}
        return part.model_copy(update={"attention": made.model_copy(update=text)})

    def _measure(
        self, folder: Path, slot: Slot, tokens: list[int], draft_part: ModelPart | None
    ) -> tuple[dict[str, MethodPart], StepCosts]:
        """Acceptance, costs and the skip set, all on the written graphs."""
        methods = {name: MethodPart() for name in self.methods}
        slot.follow([])
        slot.prefill(tokens)
        costs = measure_steps(slot, GAMMA, TREE_ROWS if self.heads.trained else ())
        if "swift" in self.methods:
            start = first_skip_set(slot.layers)
            part = SkipSetPart(attention=list(start.attention), mlp=list(start.mlp))
            methods["swift"] = MethodPart(skip=part, draft_cost=costs.draft_ms(start) / costs.plain)
        if not set(self.methods) - {*ALWAYS, "swift"}:
            return methods, costs
        self.progress("acceptance", 0, 1, "the target's own continuations")
        scorer = _chains(slot, tokens)
        self.progress("acceptance", 1, 1, "the target's own continuations")
        if draft_part is not None:
            graph = choose_operators(self.options.operators, draft_part).graph(draft_part, strict=False)
            draft = open_slot(Model(folder, draft_part, graph, self.options.threads))
            within = max(MIN_TOKENS, draft_part.facts.context // 2)  # a draft may have less context than its target
            chains = scorer if within >= len(tokens) else _chains(slot, tokens[:within])
            acceptance, draft_ms = chains.score(draft), measure_steps(draft, 1).plain
            gains = costs.speedups(acceptance, draft_ms)
            gamma = max(gains, key=lambda g: gains[g])
            methods["speculative"] = MethodPart(
                gamma=gamma,
                draft_cost=draft_ms / costs.plain,
                predicted_speedup=gains[gamma],
                measured=[self._measured(acceptance.rates, acceptance.offered[0])],
            )
        if "self-spec" in self.methods:
            methods["self-spec"] = self._self_spec(slot, scorer, costs)
        for name, heads in self.heads.trained.items():
            self.progress("heads", 0, 1, f"{name} against the target")
            chains = scorer if name == "paradecode" else _chains(slot, tokens, HEAD_POSITIONS)
            methods[name] = measure_heads(name, heads, slot, chains, costs, self._measured)
            self.progress("heads", 1, 1, f"{name} against the target")
        return methods, costs

    def _self_spec(self, slot: Slot, scorer: ChainScorer, costs: StepCosts) -> MethodPart:
        search = SkipSearch(slot, [scorer], costs, self.options.seed, self._search_store())
        if self.given_skip is not None:
            found = search.score(self.given_skip)
        else:
            found = search.run(self.options.trials, lambda done, of, what: self.progress("skip set", done, of, what))
        if search.store is not None:
            search.store.unlink(missing_ok=True)
        return MethodPart(
            gamma=found.gamma,
            skip=SkipSetPart(attention=list(found.skip.attention), mlp=list(found.skip.mlp)),
            draft_cost=found.draft_cost,
            predicted_speedup=found.speedup,
            measured=[self._measured(found.acceptance.rates, found.acceptance.offered[0])],
            notes=_advice(found),
        )

    def _measured(self, rates: list[float], positions: int) -> Measured:
        return Measured(acceptance=rates, positions=positions, text=self.text_name, text_sha256=_digest(self.text))

    def _tokens(self, limit: int) -> list[int]:
        return self.codec.encode(self.text)[: max(limit, MIN_TOKENS)]

    def _described(self) -> dict[str, Any]:
        return describe_export(self.arch, self.choice, self.methods, self.draft, self._layout())

    def _search_store(self) -> Path | None:
        if self.options.keep_search is None:
            return None
        options = self.options
        weights = self.choice.quantizer.name if self.choice.quantizer else None, self.choice.head
        facts = self.arch.source.config, options.format, *weights, options.seed, options.context
        return self.options.keep_search / f"skip-{_digest(f'{facts}{_digest(self.text)}')[:16]}.journal"

    def _memory(self, target: ModelPart, draft: ModelPart | None) -> dict[str, Any]:
        plan = self._described()
        return {"weight_bytes": plan["weight_bytes"], "kv_bytes_per_token": plan["kv_bytes_per_token"]}

    def _provenance(self) -> dict[str, Any]:
        config = (self.arch.source.path / "config.json").read_bytes()
        found = {
            "model": self.options.model
            if not Path(self.options.model).is_dir()
            else Path(self.options.model).resolve().name,
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "revision": self.options.revision,
            "draft": None if self.options.draft is None else Path(self.options.draft).name,
            "seed": self.options.seed,
        }
        return {key: value for key, value in found.items() if value is not None}


def _chains(target: Slot, tokens: list[int], positions: int = POSITIONS) -> ChainScorer:
    return ChainScorer(target, tokens, positions=min(positions, len(tokens) // 4), gamma=GAMMA)


def _limited(draft: Architecture, context: int) -> Any:
    """The draft's facts with no more context than it has; the target's context is served as far as it reaches."""
    return draft.facts.model_copy(update={"context": min(context, draft.facts.context)})


def _advice(found: Candidate) -> str:
    if found.speedup >= WORTH:
        return f"predicted {found.speedup:.2f}x on the exporting machine"
    return (
        f"predicted {found.speedup:.2f}x on the exporting machine: a draft step still costs {found.draft_cost:.2f} of "
        "a full one, so self-speculation hardly pays here"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
