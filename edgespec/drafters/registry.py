"""The decoding methods: one entry each, with every fact about it that other parts ask for.

Other packages add methods by entry points in the group ``edgespec.drafters``, whose objects are a ``Method``.

Priors are other people's numbers, used where nothing was measured and always named as assumptions.  A number of tokens
per round carries over from one machine to another, a speed-up does not (Spec-Bench's same run is 1.71x on one card and
1.44x on another), so only the former are used, and what a pass costs here is put in its place.

Spec-Bench (arXiv 2401.07851; its published ranking, Vicuna-7B, one A100) gives mean tokens per round over all its
tasks, and speed-ups by task; tokens per round of conversation are taken to be the mean times its speed-up over the
mean one's: Medusa-1 2.31 (1.97/1.71), a draft of 68M parameters 2.28 (1.66/1.52).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgespec.extensions import DRAFTERS, Table
from edgespec.formulas.cost import CostModel, speedup
from edgespec.runtimes.files.draft_adapter import DraftAdapter
from edgespec.runtimes.files.manifest import Manifest, MethodPart, SkipSetPart
from edgespec.runtimes.files.operators import NATIVE

if TYPE_CHECKING:
    from edgespec.decoding.drafter import Drafter
    from edgespec.decoding.settings import DraftOptions
    from edgespec.drafters.ngram_stores import NGramStore
    from edgespec.runtimes.slots.slot import Slot
    from edgespec.runtimes.text.translation import Translation

Needs = Literal["text", "draft", "layers", "heads", "drafter", "adapter"]
HeadKind = Literal["medusa", "blockwise", "exit"]
AR, NGRAM, SPECULATIVE, SELF_SPEC = "ar", "ngram", "speculative", "self-spec"
EAGLE, EAGLE1, PEAGLE, MTP, DFLASH, DSPARK = "eagle", "eagle1", "peagle", "mtp", "dflash", "dspark"
ASSISTANT = "assistant"
UNO = "uno"
CHAIN = "chain"  # several methods in order: in every bundle
AUTO = "auto"  # the method of the best prediction, watched and changed while it decodes: in every bundle


@dataclass(frozen=True)
class Parts:
    """Parts of a bundle and of one session that drafters are built from.

    A drafter whose ``benchmark_step`` runs a draft step has such steps timed by it before the first request.
    """

    bundle: Path  # its folder; read only
    manifest: Manifest  # its manifest
    target: Slot  # the session's target
    draft: Callable[[str], Slot]  # opens the session's ``draft`` model or ``drafter``, at the first call
    costs: Callable[[], CostModel]  # a cost model of this machine, for the measured verify curve
    store: NGramStore | None = None  # n-grams of earlier texts; None = none were given


@dataclass(frozen=True)
class Prior:
    """Assumed performance of a method."""

    acceptance: float  # P(a guess is accepted | all before it were)
    source: str  # whose number it is


@dataclass(frozen=True)
class Method:
    """A decoding method."""

    help: str  # what it does, in a few words
    # ``module:function``; called as ``function(parts, part, options)`` for a drafter, and imported by then
    builder: str
    # what a bundle must have for it: ``text``, nothing, so that it works in every bundle; ``draft``, a draft
    # model; ``layers``, a graph whose layers can be left out; ``heads``, trained heads, and such a graph;
    # ``drafter``, one conditioned on hidden states, and such a graph; ``adapter``, one that is loaded with the bundle
    needs: Needs = "text"
    # of a method that needs heads: the kind of their groups (``HeadGroup.kind``); exits are several groups of one head
    heads: HeadKind | None = None
    gamma: int | None = None  # maximum draft tokens per round; None = the bundle's, at least 6
    at_once: bool = False  # drafting costs the same for any number of draft tokens
    apart: bool = False  # its drafter is a separate checkpoint, given by ``--drafter``
    # it chooses while it writes what to leave out, so nothing can be compiled beforehand for a device
    searches: bool = False
    prior: Prior | None = None  # assumed performance if nothing was measured; None = no gain

    def build(self, parts: Parts, part: MethodPart, options: DraftOptions) -> Drafter:
        """Build its drafter for a session, by the method's entry in the manifest and the request's options."""
        module, function = self.builder.split(":")
        drafter: Drafter = getattr(import_module(module), function)(parts, part, options)
        return drafter


_HERE = "edgespec.drafters"

_CORE = {
    AR: Method("plain decoding", f"{_HERE}.plain:build", gamma=1),
    NGRAM: Method(
        "what followed the same words before",
        f"{_HERE}.ngram:build",
        gamma=8,
        # this package's own policy on the first turns of MT-bench: 1.31 tokens from 0.90 draft tokens per round
        prior=Prior(0.31 / 0.90, "texts replayed for drafters/ngram.py"),
    ),
    SPECULATIVE: Method(
        "a small draft model",
        f"{_HERE}.draft_models:build",
        "draft",
        # chains without end give 1 / (1 - a) tokens per round
        prior=Prior(1 - 1 / 2.49, "a draft of 68M in Spec-Bench, arXiv 2401.07851"),
    ),
    # The paper steers to .9 on models of 13B and more, half of whose sub-layers can go; on CodeLlama-13B it gained
    # 1.03, 1.14 and 1.12 (XSum, HumanEval, GSM8K in arXiv 2506.03700); .7 gives 1.07 at c = .55 with native int4 ones.
    SELF_SPEC: Method(
        "the model without some layers",
        f"{_HERE}.self_spec:build",
        "layers",
        prior=Prior(0.70, "Draft & Verify, arXiv 2309.08168, as measured again in arXiv 2506.03700"),
    ),
    "medusa": Method(
        "heads, a tree",
        f"{_HERE}.heads:build_medusa",
        "heads",
        heads="medusa",
        at_once=True,
        # four heads whose tree of 64 nodes gives Spec-Bench's tokens per round, 2.5
        prior=Prior(0.50, "Medusa-1 in Spec-Bench, arXiv 2401.07851"),
    ),
    "blockwise": Method(
        "heads, a block",
        f"{_HERE}.heads:build_blockwise",
        "heads",
        heads="blockwise",
        at_once=True,
        # blocks of 1.73 tokens with 4 heads of a frozen model (table 1): 1 + a + a^2 + a^3
        prior=Prior(0.48, "a frozen model in arXiv 1811.03115, table 1"),
    ),
    EAGLE: Method(
        "a drafter conditioned on hidden states",
        f"{_HERE}.hidden_state:build",
        "drafter",
        apart=True,
        # speculators' measured lengths of chains of 3 with Qwen3-8B (its issue 563): 2.71 on code, 2.25 on summaries;
        # chat is taken to be between them: 1 + a + a^2 + a^3
        prior=Prior(0.66, "EAGLE-3 with Qwen3-8B, measured by its publishers"),
    ),
    EAGLE1: Method(
        "a drafter conditioned on the last hidden state",
        f"{_HERE}.hidden_state:build",
        "drafter",
        apart=True,
        # the paper's share of right first guesses is .7 to .8
        prior=Prior(0.60, "EAGLE with Vicuna and LLaMA 2 models, arXiv 2401.15077, less what chains lose"),
    ),
    PEAGLE: Method(
        "the same, all guesses in one pass",
        f"{_HERE}.hidden_state:build",
        "drafter",
        at_once=True,
        apart=True,
        # taken to be as good as a chain's: the paper reports lengths like EAGLE-3's
        prior=Prior(0.66, "EAGLE-3 with Qwen3-8B, measured by its publishers"),
    ),
    MTP: Method(
        "a layer of the checkpoint",
        f"{_HERE}.hidden_state:build",
        "drafter",
        # 35 to 47 % of two guesses on prose with Qwen3.5-4B (Rapid-MLX's issue 3115)
        prior=Prior(0.60, "Qwen3.5-4B, measured by its users"),
    ),
    DFLASH: Method(
        "a block of guesses in one pass",
        f"{_HERE}.hidden_state:build",
        "drafter",
        at_once=True,
        apart=True,
        # first 1, 2, 3, 4 guesses right with a drafter of Qwen3-8B, as its publisher measured it: .665 .474 .338 .243
        prior=Prior(0.68, "DFlash with Qwen3-8B, measured by its publisher"),
    ),
    DSPARK: Method(
        "such a block, corrected, of a length that pays",
        f"{_HERE}.hidden_state:build",
        "drafter",
        at_once=True,
        apart=True,
        # 3.41 tokens per round of blocks of 7 with Qwen3-8B on code at temperature 1 (SPEED-Bench): 1 + a + ... + a^7
        prior=Prior(0.73, "DSpark with Qwen3-8B, as its publisher measured it"),
    ),
    ASSISTANT: Method(
        "small layers over the model's keys and values",
        f"{_HERE}.hidden_state:build",
        "drafter",
        apart=True,
        # first 1 to 4 guesses right with Gemma 4 12B: .47, .30, .23, .20 (koboldcpp's issue 2262); .66 to .89 of 4 with
        # 31B (llama.cpp's issue 23398)
        prior=Prior(0.60, "Gemma 4 12B and 31B, measured by their users"),
    ),
    UNO: Method(
        "the model with a LoRA adapter for mask rows",
        f"{_HERE}.uno:build",
        "adapter",
        gamma=8,
        at_once=True,
        # the first guess is the model's own token; no rates are published, so an adapter's own are used
        prior=Prior(0.70, "assumed"),
    ),
}

METHODS: Table[Method] = Table(DRAFTERS, _CORE, lambda made: isinstance(made, Method))
"""The methods by name: those above, then those of plug-ins (group ``edgespec.drafters``)."""

# of self-spec, where it leaves nothing out but low planes
HIGH_PLANES = Prior(0.90, "high planes of the embedded model; larger ones agree more often")
# time of a native int8 pass over n rows over that of one, 2 threads, short contexts (docs/dev/measurements.md)
_INT8_ROWS = {1: 1.0, 2: 1.08, 4: 1.16, 8: 1.55, 16: 2.2}


def needing(*needs: Needs) -> tuple[str, ...]:
    """List the methods that need one of these, in the usual order."""
    return tuple(name for name, method in METHODS.items() if method.needs in needs)


def drafters_apart() -> tuple[str, ...]:
    """List the methods whose drafter is a separate checkpoint."""
    return tuple(name for name, method in METHODS.items() if method.apart)


def has_exits(name: str) -> bool:
    """Return whether a method's heads are early exits; False for a name that is not known here."""
    return name in METHODS and METHODS[name].heads == "exit"


def draft_drafter(model: Slot, vocab: int, translation: Translation | None) -> Drafter:
    """Build the drafter of a draft model to measure it; see ``draft_models.drafter_of``."""
    made: Drafter = import_module(f"{_HERE}.draft_models").drafter_of(model, vocab, translation)
    return made


def searching() -> tuple[str, ...]:
    """List the methods that choose while they write what to leave out."""
    return tuple(name for name, method in METHODS.items() if method.searches)


def prior_of(method: str, part: MethodPart) -> Prior | None:
    """Return what to expect of a method where nothing was measured; part: its entry in the manifest."""
    planes = part.skip is not None and part.skip.whole and METHODS[method].needs == "layers"
    return HIGH_PLANES if planes else METHODS[method].prior


def native_alone(manifest: Manifest) -> tuple[str, ...]:
    """List the bundle's methods whose drafter only native operators can run."""
    drafter = manifest.drafter
    alone = drafter is not None and drafter.main == NATIVE
    found = [name for name in needing("drafter") if alone and name in manifest.methods]
    own = manifest.methods.get(SELF_SPEC)
    return (*found, SELF_SPEC) if own and own.skip and own.skip.whole else tuple(found)


def complete(manifest: Manifest, draft_adapter: Path | None = None) -> Manifest:
    """Add the methods that need nothing of a bundle to its manifest, and leave out those that are not known here.

    int8 weights in two planes can draft by the high ones, though no export prepared it.  An encoder has no methods.

    Args:
        manifest: of the bundle.
        draft_adapter: folder of the adapter that is loaded with it.

    Raises:
        BundleError: its description is damaged.
    """
    if manifest.is_encoder:
        return manifest.model_copy(update={"methods": {}})
    parts: Mapping[str, MethodPart] = {
        name: manifest.methods.get(name, MethodPart())
        for name, method in METHODS.items()
        if name in manifest.methods or method.needs == "text"
    }
    if draft_adapter is not None:
        parts = {**parts, UNO: by_draft_adapter(DraftAdapter.read(draft_adapter))}
    own, planes = parts.get(SELF_SPEC), manifest.target.planes and not manifest.target.high_alone
    if planes and own is None and manifest.target.layers_have_planes:
        parts = {name: parts.get(name, by_high_planes(manifest)) for name in METHODS if name in {*parts, SELF_SPEC}}
    elif not planes and own and own.skip and own.skip.whole:  # read as a model of 4 bits
        parts = {name: part for name, part in parts.items() if name != SELF_SPEC}
    return manifest.model_copy(update={"methods": parts})


def by_high_planes(manifest: Manifest) -> MethodPart:
    """Draft by the high planes of everything.  Its gain is assumed: that of bytes, and of ``HIGH_PLANES``."""
    target = manifest.target
    layers, entry = list(range(target.facts.layers)), manifest.files.get(target.weights)
    skip = SkipSetPart(high_attention=layers, high_mlp=layers, high_head=True)
    if entry is None or not entry.size:
        return MethodPart(skip=skip)
    curve = CostModel(_INT8_ROWS)
    gains = {
        gamma: speedup(HIGH_PLANES.acceptance, gamma, 1 - target.low_nibble_bytes / entry.size, curve.v)
        for gamma in range(1, 9)
    }
    gamma = max(gains, key=lambda one: gains[one])
    return MethodPart(gamma=gamma, skip=skip, predicted_speedup=gains[gamma], notes=f"assumed: {HIGH_PLANES.source}")


def by_draft_adapter(draft: DraftAdapter) -> MethodPart:
    """Draft by a loaded adapter.  Its gain is assumed from its own rates, and the prices of int8 rows."""
    curve, gains, tokens = CostModel(_INT8_ROWS), dict[int, float](), 2.0
    for masks, right in enumerate(draft.acceptance, 1):
        tokens += right
        gains[1 + masks] = tokens / (curve.v(1 + masks) + curve.v(2 + masks))
    if not gains:
        return MethodPart(gamma=1 + draft.block)
    gamma = max(gains, key=lambda one: gains[one])
    return MethodPart(gamma=gamma, predicted_speedup=gains[gamma], notes="assumed: the adapter's held-out acceptance")
