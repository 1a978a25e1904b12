"""The decoding methods: an entry each, with every fact about it that others ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from edgespec.drafters import priors
from edgespec.drafters.priors import Prior
from edgespec.runtimes.files.manifest import Manifest, MethodPart
from edgespec.runtimes.files.operators import NATIVE

if TYPE_CHECKING:
    from edgespec.decoding.drafter import Drafter
    from edgespec.decoding.settings import DraftOptions
    from edgespec.drafters.parts import Parts

Needs = Literal["text", "draft", "layers", "heads", "drafter"]
AR, NGRAM, SPECULATIVE, SELF_SPEC = "ar", "ngram", "speculative", "self-spec"
EAGLE, MTP, DFLASH, ASSISTANT = "eagle", "mtp", "dflash", "assistant"
CHAIN = "chain"  # several methods asked in turn: in every bundle
AUTO = "auto"  # the method of the best prediction, watched and changed while it decodes: in every bundle


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        help: what it does, in a few words.
        builder: ``module:function``; called as ``function(parts, part, options)`` for a drafter, and imported by then.
        needs: what a bundle must have for it: ``text``, nothing, so that it works in every bundle; ``draft``, a draft
            model; ``layers``, a graph whose layers can be left out; ``heads``, trained heads, and such a graph;
            ``drafter``, one conditioned on hidden states, and such a graph.
        gamma: most guesses a round; None = the bundle's, at least 6.
        at_once: guessing costs the same however many guesses it makes.
        apart: its drafter is a checkpoint of its own, given by ``--drafter``.
        searches: it chooses while it writes what to leave out, so nothing can be compiled beforehand for a device.
        prior: what to expect of it where nothing was measured; None = no gain.
    """

    help: str
    builder: str
    needs: Needs = "text"
    gamma: int | None = None
    at_once: bool = False
    apart: bool = False
    searches: bool = False
    prior: Prior | None = None

    def build(self, parts: Parts, part: MethodPart, options: DraftOptions) -> Drafter:
        """Its drafter for a session.

        Args:
            parts: what the bundle offers.
            part: the method's entry in the manifest.
            options: of the request.
        """
        module, function = self.builder.split(":")
        drafter: Drafter = getattr(import_module(module), function)(parts, part, options)
        return drafter


_HERE = "edgespec.drafters"
METHODS: dict[str, Method] = {
    AR: Method("plain decoding", f"{_HERE}.ar:build", gamma=1),
    NGRAM: Method("what followed the same words before", f"{_HERE}.ngram:build", gamma=8, prior=priors.NGRAM),
    SPECULATIVE: Method("a small draft model", f"{_HERE}.speculative:build", "draft", prior=priors.SPECULATIVE),
    SELF_SPEC: Method("the model without some layers", f"{_HERE}.self_spec:build", "layers", prior=priors.SELF_SPEC),
    "swift": Method(
        "the same, layers searched while it writes",
        f"{_HERE}.swift:build",
        "layers",
        searches=True,
        prior=priors.SWIFT,
    ),
    "medusa": Method("heads, a tree", f"{_HERE}.medusa:build", "heads", at_once=True, prior=priors.MEDUSA),
    "blockwise": Method("heads, a block", f"{_HERE}.blockwise:build", "heads", at_once=True, prior=priors.BLOCKWISE),
    "paradecode": Method("early exits", f"{_HERE}.paradecode:build", "heads"),
    EAGLE: Method(
        "a drafter conditioned on hidden states",
        f"{_HERE}.draft_decoder:build",
        "drafter",
        apart=True,
        prior=priors.EAGLE,
    ),
    MTP: Method("a layer of the checkpoint", f"{_HERE}.draft_decoder:build", "drafter", prior=priors.MTP),
    DFLASH: Method(
        "a block of guesses in one pass",
        f"{_HERE}.draft_decoder:build",
        "drafter",
        at_once=True,
        apart=True,
        prior=priors.DFLASH,
    ),
    ASSISTANT: Method(
        "small layers over the model's keys and values",
        f"{_HERE}.draft_decoder:build",
        "drafter",
        apart=True,
        prior=priors.ASSISTANT,
    ),
}


def needing(*needs: Needs) -> tuple[str, ...]:
    """Names of the methods that need one of these, in the usual order."""
    return tuple(name for name, method in METHODS.items() if method.needs in needs)


def drafters_apart() -> tuple[str, ...]:
    """Names of the methods whose drafter is a checkpoint of its own."""
    return tuple(name for name, method in METHODS.items() if method.apart)


def searching() -> tuple[str, ...]:
    """Names of the methods that choose while they write what to leave out."""
    return tuple(name for name, method in METHODS.items() if method.searches)


def native_alone(manifest: Manifest) -> tuple[str, ...]:
    """Names of the bundle's methods whose drafter only native operators can run."""
    drafter = manifest.drafter
    alone = drafter is not None and drafter.main == NATIVE
    return tuple(name for name in needing("drafter") if alone and name in manifest.methods)


def complete(manifest: Manifest) -> Manifest:
    """A bundle's manifest with the methods that need nothing of it, and without those that nobody here knows."""
    parts: Mapping[str, MethodPart] = {
        name: manifest.methods.get(name, MethodPart())
        for name, method in METHODS.items()
        if name in manifest.methods or method.needs == "text"
    }
    return manifest.model_copy(update={"methods": parts})
