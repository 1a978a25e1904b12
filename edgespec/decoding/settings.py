"""What one request may set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, TypedDict

from edgespec.decoding.beams import BeamOptions
from edgespec.decoding.proposer import Proposer
from edgespec.decoding.sampling import Rules, SamplingParams, check_fields, whole
from edgespec.decoding.verify import EXACT, Accept
from edgespec.errors import InvalidRequest, unknown_name

MAX_NEW_TOKENS = 128  # of a text that nothing ends
MOST_CYCLES = 16
MOST_GUIDANCE = 100
MOST_LIKELIEST = 20  # tokens whose log-probabilities are told beside that of the one that was chosen
BATCH = 4
SHADOW = 16  # rounds between two comparisons with plain decoding, where acceptance is not lossless
MOST_NODES = 64  # of a tree of guesses: exported graphs have room for so many beyond the context

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
        """Take a JSON schema.

        Args:
            schema: parsed, or as text.
        """
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Take a regular expression.

        Args:
            expression: what the whole text must match.
        """
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Take a grammar in Lark's notation.

        Args:
            grammar: as llguidance reads it.
        """
        return cls("lark", grammar)


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_branch(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(whole(width, 1) for width in value)


_DRAFTS: Rules = {
    "nodes": (f"a whole number from 1 to {MOST_NODES}", lambda value: value is None or whole(value, 1, MOST_NODES)),
    "cycles": (f"a whole number from 0 to {MOST_CYCLES}", lambda value: value is None or whole(value, 0, MOST_CYCLES)),
    "threshold": ("a probability, 0 to 1", lambda value: value is None or 0 <= value <= 1),
    "branch": (
        "one or several integers from 1, as in (2,) or (3, 2)",
        lambda value: value is None or _is_branch(value),
    ),
    "search": ("a share of the decoding time, 0 to 1: 0.02 is 2 %", lambda value: 0 <= value <= 1),
}
_LEAST = {
    "batch": (1, "sequences at once"),
    "max_new_tokens": (1, "None goes on until the answer ends"),
    "gamma": (1, "use method ar for decoding without drafts"),
    "shadow": (0, "rounds between two comparisons; 0 = none"),
}
_RULES: Rules = {
    "max_new_tokens": ("an integer, or None", lambda value: value is None or whole(value, 1)),
    "gamma": ("an integer, or None", lambda value: value is None or whole(value, 1)),
    "batch": ("an integer", lambda value: whole(value, 1)),
    "shadow": ("a number of rounds, 0 for no comparison", lambda value: value is None or whole(value)),
    "top_logprobs": (f"0 to {MOST_LIKELIEST}", lambda value: whole(value, 0, MOST_LIKELIEST)),
    "method": ("a name, or None", _text_or_none),
    "prediction": ("text, token ids, or None", lambda value: isinstance(value, (str, tuple, type(None)))),
    "source_language": ("a language, or None", _text_or_none),
    "target_language": ("a language, or None", _text_or_none),
    "stop": (
        "text, or several texts",
        lambda value: isinstance(value, (tuple, list)) and all(isinstance(text, str) for text in value),
    ),
    "begin": ("token ids, at least one", lambda value: value is None or (value and all(map(whole, value)))),
    "beams": ("a number of beams, BeamOptions, or None", lambda value: isinstance(value, (BeamOptions, type(None)))),
    "guidance_scale": (f"0 to {MOST_GUIDANCE}, or None", lambda value: value is None or 0 <= value <= MOST_GUIDANCE),
    "negative_prompt": ("text, token ids, or None", lambda value: isinstance(value, (str, tuple, type(None)))),
    "accept": ("a rule of acceptance, or its text", lambda value: isinstance(value, Accept)),
    "grammar": ("a Grammar", lambda value: isinstance(value, (Grammar, type(None)))),
    "proposer": (
        "an object with a method propose(tokens, budget): see docs/methods.md",
        lambda value: value is None or callable(value.propose),
    ),
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
        check_fields(self, _DRAFTS)
        branch = self.branch or ()
        if (nodes := sum(prod(branch[: depth + 1]) for depth in range(len(branch)))) > MOST_NODES:
            raise InvalidRequest(f"branch {branch} makes a tree of {nodes} guesses: expected at most {MOST_NODES}")


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
    prediction: str | Sequence[int] | None
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
        proposer: any object with ``propose(tokens, budget)``, instead of a method (``decoding.proposer.Proposer``).
        markers: special tokens that stay in the text, for who reads calls of tools there; others are left out.
        prediction: text that is expected, or its tokens, as of a file before an edit: guesses for every method but ar.
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
    prediction: str | tuple[int, ...] | None = None
    source_language: str | None = None
    target_language: str | None = None
    begin: tuple[int, ...] | None = None
    beams: BeamOptions | None = None
    guidance_scale: float | None = None
    negative_prompt: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, (least, hint) in _LEAST.items():
            if isinstance(value := getattr(self, name), int) and value < least:
                raise InvalidRequest(f"{name} {value}: expected at least {least}", hint)
        check_fields(self, _RULES)

    @property
    def guided(self) -> bool:
        """Whether a prompt's logits are mixed with those of another one."""
        return self.guidance_scale not in (None, 1)

    def changed(self, **changes: Any) -> Settings:
        """Copy with changes on top; the fields of SamplingParams and DraftOptions may be given directly.

        ``accept`` may be the text of a rule (``Accept.parse``), ``branch`` a number or a list.

        Args:
            **changes: fields by name.

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
