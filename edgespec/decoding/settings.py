"""What one request may set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, TypedDict

from edgespec.decoding.beams import BeamOptions
from edgespec.decoding.drafter import Proposer
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verify import EXACT, Accept
from edgespec.errors import InvalidRequest, unknown_name

MAX_NEW_TOKENS = 128  # of a text that nothing ends
MOST_CYCLES = 16
MOST_GUIDANCE = 100
MOST_LIKELIEST = 20  # tokens whose log-probabilities are told beside that of the one that was chosen
BATCH = 4
SHADOW = 16  # rounds between two comparisons with plain decoding, where acceptance is not lossless
MOST_NODES = 64  # of a tree of guesses: exported graphs have room for so many beyond the context
# what counts must be at least, and what else may be meant
_LEAST: dict[str, tuple[str, str | None]] = {
    "max_new_tokens": ("1", "None goes on until the answer ends"),
    "batch": ("one sequence at once", None),
    "gamma": ("1", "use method ar for decoding without drafts"),
}

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What a text must be.

    Attributes:
        kind: ``json_schema``; ``regex``, which the whole text must match; or ``lark``, a grammar in Lark's notation as
            llguidance reads it.
        text: the schema as JSON, the expression, or the grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Take a JSON schema, parsed or as text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Take a regular expression that the whole text must match."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Take a grammar in Lark's notation."""
        return cls("lark", grammar)


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "method": ((str, type(None)), "a name, or None"),
    "prediction": ((str, type(None)), "text, or None"),
    "source_language": ((str, type(None)), "a language, or None"),
    "target_language": ((str, type(None)), "a language, or None"),
    "beams": ((BeamOptions, type(None)), "a number of beams, BeamOptions, or None"),
    "guidance_scale": ((int, float, type(None)), "a number, or None"),
    "negative_prompt": ((str, tuple, type(None)), "text, token ids, or None"),
    "accept": ((Accept,), "a rule of acceptance, or its text"),
    "grammar": ((Grammar, type(None)), "a Grammar"),
}


@dataclass(frozen=True)
class DraftOptions:
    """What shapes the guesses of some methods; None = what the bundle or the method has found best.

    Attributes:
        branch: of draft models, and of methods that guess like one: guesses per node by depth; one number: along
            the likeliest chain.
        nodes: medusa: most guesses of a tree.
        threshold: of early exits: the confidence from which one is taken; of dspark's guesses: from which they are
            offered, None = as long as they are worth a row.
        kind: of a search for layers to skip: the kind of text that its result is remembered for.
        cycles: blockwise: passes that refine a block before it is verified.
        proposers: chain: methods that are asked in turn.
        search: most time that this search may take, as a share of the time of decoding; 0 = no search.

    Raises:
        InvalidRequest: a branch of no numbers, of one below 1, or of more than ``MOST_NODES`` guesses; nodes or cycles
            beyond theirs; a threshold outside 0 to 1.
    """

    branch: tuple[int, ...] | None = None
    nodes: int | None = None
    threshold: float | None = None
    kind: str = "text"
    cycles: int | None = None
    proposers: tuple[str, ...] = ()
    search: float = 0.02

    def __post_init__(self) -> None:
        for name, least, most in (("nodes", 1, MOST_NODES), ("cycles", 0, MOST_CYCLES)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and least <= value <= most):
                raise InvalidRequest(f"{name} is {value!r}: expected a whole number from {least} to {most}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InvalidRequest(f"threshold is {self.threshold!r}: expected a probability, 0 to 1")
        if self.branch is None:
            return
        if not (isinstance(self.branch, tuple) and self.branch and all(isinstance(b, int) for b in self.branch)):
            raise InvalidRequest(f"branch is {self.branch!r}: expected one or several integers", "as in (2,) or (3, 2)")
        nodes = sum(prod(self.branch[: depth + 1]) for depth in range(len(self.branch)))
        if min(self.branch) < 1 or nodes > MOST_NODES:
            raise InvalidRequest(
                f"branch {self.branch} makes a tree of {nodes} guesses: expected numbers from 1, and at most "
                f"{MOST_NODES} guesses"
            )


class SettingsChanges(TypedDict, total=False):
    """Fields of ``Settings``, ``SamplingParams`` and ``DraftOptions`` by name, for editors (``Settings.changed``)."""

    method: str | None
    max_new_tokens: int | None
    gamma: int | None
    fallback: bool
    adaptive: bool
    sampling: SamplingParams
    drafts: DraftOptions
    stop: str | tuple[str, ...]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    batch: int
    shadow: int | None
    accept: Accept | str
    grammar: Grammar | None
    proposer: Proposer | None
    markers: tuple[str, ...]
    prediction: str | None
    source_language: str | None
    target_language: str | None
    begin: Sequence[int] | None
    beams: BeamOptions | int | None
    guidance_scale: float | None
    negative_prompt: str | Sequence[int] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    acceptance: Literal["rejection", "coupled"]
    verification: Literal["token", "block"]
    branch: int | Sequence[int] | None
    nodes: int | None
    threshold: float | None
    kind: str
    cycles: int | None
    proposers: tuple[str, ...]
    search: float


@dataclass(frozen=True)
class Settings:
    """What one request may set; each has the default of ``edgespec run``.

    Attributes:
        method: a method of the bundle, chain or auto; None = auto: the one predicted to be clearly faster than plain
            decoding, else ngram, watched while it decodes and changed where it does not help.
        max_new_tokens: most tokens to write; None = until the model ends its answer or the context is full, where the
            bundle has a chat template or a grammar binds the text, and 128 where nothing need end it.
        gamma: most guesses a round; None = the method's own.
        fallback: decode plainly while drafting does not help.
        adaptive: choose the number of guesses by what is fastest; False = always gamma.
        sampling: how tokens are chosen.
        drafts: what shapes the guesses of some methods.
        stop: strings that end the text.
        ignore_eos: go on after EOS; for measurements.
        logprobs: report log-probabilities.
        top_logprobs: and those of as many likeliest tokens for each; in ``Round.top_logprobs`` of a stream.
        batch: sequences that ``generate_batch`` decodes at once.
        shadow: compare one round in so many with plain decoding, 0 = none; None = 16 where acceptance is not lossless,
            else 0.
        accept: which guesses are accepted; anything but the default gives losslessness away.
        grammar: what the text must be: a JSON schema, a regular expression, a grammar; None = anything.
        proposer: any object with ``propose(tokens, budget)``, instead of a method (``decoding.drafter.Proposer``).
        markers: special tokens that stay in the text, for who reads calls of tools there; others are left out.
        prediction: text that is expected, such as a file before an edit: guesses for every method but ar.
        source_language, target_language: from and to which an encoder-decoder translates, by its own code, that of ISO
            639, or an English name; None = as the model has it.
        begin: tokens that an encoder-decoder's text begins with, instead of those that its languages ask for.
        beams: search so many texts at once for the likeliest, by plain passes; None = no search.
        guidance_scale: classifier-free guidance: by how much the prompt counts beside ``negative_prompt``, at least 0;
            None = none, or of codes the model's own.
        negative_prompt: text, or token ids, of guidance's other half; None = the prompt's last token, or of codes what
            the model was trained with.

    Raises:
        InvalidRequest: a gamma or a batch below 1, a shadow below 0, or a proposer that cannot propose.
    """

    method: str | None = None
    max_new_tokens: int | None = None
    gamma: int | None = None
    fallback: bool = True
    adaptive: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafts: DraftOptions = field(default_factory=DraftOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    batch: int = BATCH
    shadow: int | None = None
    accept: Accept = EXACT
    grammar: Grammar | None = None
    proposer: Proposer | None = None
    markers: tuple[str, ...] = ()
    prediction: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    begin: tuple[int, ...] | None = None
    beams: BeamOptions | None = None
    guidance_scale: float | None = None
    negative_prompt: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, (least, hint) in _LEAST.items():
            value = getattr(self, name)
            if value is None and name != "batch":
                continue
            if not isinstance(value, int):
                raise InvalidRequest(f"{name} is {value!r}: expected an integer")
            if value < 1:
                raise InvalidRequest(f"{name} {value}: expected at least {least}", hint)
        for name, (kinds, expected) in _KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                raise InvalidRequest(f"{name} is {value!r}: expected {expected}")
        self._check_content()
        if not (isinstance(self.top_logprobs, int) and 0 <= self.top_logprobs <= MOST_LIKELIEST):
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs!r}: expected 0 to {MOST_LIKELIEST}")
        if self.shadow is not None and (not isinstance(self.shadow, int) or self.shadow < 0):
            raise InvalidRequest(f"shadow {self.shadow!r}: expected a number of rounds, or 0 for no comparison")
        if self.proposer is not None and not callable(getattr(self.proposer, "propose", None)):
            raise InvalidRequest(
                f"proposer is {self.proposer!r}: expected an object with a method propose(tokens, budget)",
                "see docs/methods.md",
            )

    def _check_content(self) -> None:
        if not (isinstance(self.stop, (tuple, list)) and all(isinstance(text, str) for text in self.stop)):
            raise InvalidRequest(f"stop is {self.stop!r}: expected text, or several texts")
        if not 0 <= (self.guidance_scale or 0) <= MOST_GUIDANCE:
            raise InvalidRequest(f"guidance_scale is {self.guidance_scale!r}: expected 0 to {MOST_GUIDANCE}")
        if self.begin is not None and not (self.begin and all(isinstance(token, int) for token in self.begin)):
            raise InvalidRequest(f"begin is {self.begin!r}: expected token ids, at least one")

    @property
    def guided(self) -> bool:
        """Whether a prompt's logits are mixed with those of another one."""
        return self.guidance_scale not in (None, 1)

    def changed(self, **changes: Any) -> Settings:
        """Copy with changes on top; the fields of SamplingParams and DraftOptions may be given directly.

        ``accept`` may be the text of a rule (``Accept.parse``), ``branch`` a number or a list.

        Raises:
            InvalidRequest: an unknown name, or a value outside its range.
        """
        if not changes:
            return self
        mine, sampling, drafts = (set(of.__dataclass_fields__) for of in (Settings, SamplingParams, DraftOptions))
        if unknown := [name for name in changes if name not in mine | sampling | drafts]:
            raise unknown_name("setting", unknown[0], mine | sampling | drafts)
        if isinstance(changes.get("stop"), str):
            changes["stop"] = (changes["stop"],)
        if isinstance(changes.get("accept"), str):
            changes["accept"] = Accept.parse(changes["accept"], self.accept.min_block)
        if isinstance(beams := changes.get("beams"), int):
            changes["beams"] = replace(self.beams or BeamOptions(), beams=beams) if beams != 1 else None
        for name in ("begin", "negative_prompt"):
            if isinstance(tokens := changes.get(name), Sequence) and not isinstance(tokens, str):
                changes[name] = tuple(tokens)
        if isinstance(branch := changes.get("branch"), (int, list)):
            changes["branch"] = (branch,) if isinstance(branch, int) else tuple(branch)
        if drawn := {name: value for name, value in changes.items() if name in sampling}:
            changes["sampling"] = replace(changes.get("sampling", self.sampling), **drawn)
        if shaped := {name: value for name, value in changes.items() if name in drafts}:
            changes["drafts"] = replace(changes.get("drafts", self.drafts), **shaped)
        return replace(self, **{name: value for name, value in changes.items() if name in mine})
