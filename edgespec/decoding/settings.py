"""Settings of one request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from math import prod
from typing import Any, Literal, TypedDict

from edgespec.declared import (
    ANY,
    FLAG,
    METHOD_NAMES,
    NAME,
    Range,
    Setting,
    check,
    copy_with,
    count,
    declared,
    number,
    part,
    setting,
    whole,
)
from edgespec.decoding.beams import BeamOptions
from edgespec.decoding.proposer import Proposer
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verify import EXACT, Accept
from edgespec.errors import InvalidRequest

MAX_NEW_TOKENS = 128  # of a text that nothing ends
MOST_CYCLES = 16
MOST_GUIDANCE = 100
MOST_LIKELIEST = 20  # maximum of top logprobs, in addition to the chosen token's
BATCH = 4
SHADOW = 16  # rounds between two comparisons with plain decoding, where acceptance is not lossless
MOST_NODES = 64  # of a draft tree: exported graphs have room for this many rows beyond the context

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """Constraint on the whole text.

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


def _is_branch(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(whole(width, 1) for width in value)


def _branch(value: Any, before: Any) -> Any:
    return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value


def _tuple(value: Any, before: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _method(value: Any, before: Any) -> Any:
    return METHOD_NAMES.get(value, value) if isinstance(value, str) else value


def _texts(value: Any, before: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _accept(value: Any, before: Accept) -> Any:
    return Accept.parse(value, before.min_block) if isinstance(value, str) else value


def _beams(value: Any, before: BeamOptions | None) -> Any:
    if not isinstance(value, int):
        return value
    return replace(before or BeamOptions(), beams=value) if value != 1 else None


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a number or several with commas between, like 2 or 3,2,1") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


ELSEWHERE = {  # settings of other libraries
    "json_schema": "grammar=Grammar.json_schema(...)",
    "regex": "grammar=Grammar.regex(...)",
    "lark": "grammar=Grammar.lark(...)",
    "stream": "engine.stream(...)",
    "n": "engine.generate_batch(...)",
}
_TOKENS = Range("text, token ids", lambda value: isinstance(value, (str, tuple)))


@dataclass(frozen=True)
class DraftOptions:
    """The shape of the guesses of some methods; None = the bundle's or the method's best.

    Raises:
        InvalidRequest: a value outside its range, or a branch of more than ``MOST_NODES`` guesses.
    """

    branch: tuple[int, ...] | None = setting(
        None,
        Range("one or several integers from 1, as in (2,) or (3, 2)", _is_branch),
        "tree of guesses: 2 = two at every node along the first choices, 3,2,1 = by depth",
        set=_widths,
        takes="int | Sequence[int] | None",
        adapt=_branch,
        shown="a chain",
    )
    nodes: int | None = setting(
        None, count(1, MOST_NODES), "medusa: maximum number of guesses of a tree", shown="predicted best"
    )
    threshold: float | None = setting(
        None,
        number("a probability, 0 to 1", 0, 1),
        "minimum probability: early exits: of an exit; dspark: of a guess",
        set=float,
        shown="the export's",
    )
    kind: str = setting("text", NAME, "skip-set search: kind of text, such as chat or code")
    cycles: int | None = setting(
        None, count(0, MOST_CYCLES), "blockwise: passes that refine a block before it is verified", shown="0"
    )
    proposers: tuple[str, ...] = setting(
        (), ANY, "chain: methods asked in turn, as in ngram,self-spec", set=_names, shown="`ngram` and the best"
    )
    search: float = setting(
        0.02,
        number("a share of the decoding time, 0 to 1: 0.02 is 2 %", 0, 1),
        "skip-set search: largest fraction of the decoding time",
    )

    def __post_init__(self) -> None:
        check(self)
        branch = self.branch or ()
        if (nodes := sum(prod(branch[: depth + 1]) for depth in range(len(branch)))) > MOST_NODES:
            raise InvalidRequest(f"branch {branch} makes a tree of {nodes} guesses: expected at most {MOST_NODES}")


# -- generated by tools/generate_settings.py ---------------------------------------------------------------------------


class SettingsChanges(TypedDict, total=False):
    """All settings by name, for editors (``Settings.changed``)."""

    sampling: SamplingParams
    drafts: DraftOptions
    method: str | None
    adapter: str | None
    max_new_tokens: int | None
    gamma: int | None
    fallback: bool
    adaptive: bool
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
    prefix_tokens: Sequence[int] | None
    beams: BeamOptions | int | None
    guidance_scale: float | None
    negative_prompt: str | Sequence[int] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    acceptance: Literal["rejection", "coupled"]
    verification: Literal["token", "block"]
    presence_penalty: float
    frequency_penalty: float
    branch: int | Sequence[int] | None
    nodes: int | None
    threshold: float | None
    kind: str
    cycles: int | None
    proposers: tuple[str, ...]
    search: float


# -- end ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of one request; each has the default of ``edgespec run``.

    Attributes:
        sampling: the settings that choose tokens.
        drafts: the settings of some methods' guesses.

    Raises:
        InvalidRequest: a value outside its range, or a proposer that cannot propose.
    """

    method: str | None = setting(
        None,
        NAME,
        "a method of the bundle, `plain`, `chain` or `auto`",
        option="--method",
        server=True,
        adapt=_method,
        shown="`auto`",
    )
    adapter: str | None = setting(
        None,
        NAME,
        "name of a LoRA adapter that was loaded with the bundle",
        shown="none",
    )
    max_new_tokens: int | None = setting(
        None,
        count(1),
        "maximum number of new tokens",
        option="--max-new-tokens",
        shown="to the end of an answer; 128 for a continued text",
    )
    gamma: int | None = setting(
        None,
        count(1, words="an integer >= 1 (method ar decodes without guesses)"),
        "maximum number of guesses per round",
        option="--num-draft-tokens",
        server=True,
        shown="the method's",
    )
    fallback: bool = setting(
        True, FLAG, "plain decoding while drafting does not help", option="--no-fallback", server=True
    )
    adaptive: bool = setting(True, FLAG, "adapt the number of guesses to what is fastest", server=True)
    sampling: SamplingParams = part(SamplingParams)
    drafts: DraftOptions = part(DraftOptions)
    stop: tuple[str, ...] = setting(
        (),
        Range("text, or several texts", lambda value: isinstance(value, (tuple, list)) and all(
            isinstance(text, str) for text in value
        )),
        "texts that end the output",
        option="--stop",
        takes="str | tuple[str, ...]",
        adapt=_texts,
        shown="none",
    )  # fmt: skip
    ignore_eos: bool = setting(False, FLAG, "continue after the end token, for measurements")
    logprobs: bool = setting(False, FLAG, "report the log-probability of each token")
    top_logprobs: int = setting(
        0, count(0, MOST_LIKELIEST), "number of likeliest tokens reported for each: `Round.top_logprobs` of a stream"
    )
    batch: int = setting(BATCH, count(1), "sequences that `generate_batch` decodes at once")
    shadow: int | None = setting(
        None, count(0), "compare one round in N with plain decoding; 0 is off", shown="16 if lossy, else 0"
    )
    accept: Accept = setting(
        EXACT,
        Range("a rule of acceptance, or its text", lambda value: isinstance(value, Accept)),
        "rule that accepts guesses; only `exact` is lossless",
        option="--accept",
        takes="Accept | str",
        adapt=_accept,
        shown="`exact`",
    )
    grammar: Grammar | None = setting(
        None,
        Range("a Grammar", lambda value: isinstance(value, Grammar)),
        "the text's form: a JSON schema, a regular expression or a grammar",
        option="--json-schema --regex --grammar",
        shown="none",
    )
    proposer: Proposer | None = setting(
        None,
        Range(
            "an object with a method propose(tokens, budget): see docs/methods.md",
            lambda value: callable(value.propose),
        ),
        "your own proposer, instead of a method",
        shown="none",
    )
    markers: tuple[str, ...] = setting(
        (), ANY, "special tokens to keep in the text, such as `[TOOL_CALLS]`", shown="none"
    )
    prediction: str | tuple[int, ...] | None = setting(
        None,
        _TOKENS,
        "expected text, or its tokens, such as a file before an edit",
        takes="str | Sequence[int] | None",
        shown="none",
    )
    source_language: str | None = setting(
        None,
        Range("a language", lambda value: isinstance(value, str), str),
        "translation: source language: the model's code, ISO 639, or an English name",
        option="--from",
        server=True,
        shown="the model's own, if any",
    )
    target_language: str | None = setting(
        None,
        Range("a language", lambda value: isinstance(value, str), str),
        "translation: output language",
        option="--to",
        server=True,
        shown="the model's own, if any",
    )
    prefix_tokens: tuple[int, ...] | None = setting(
        None,
        Range("token ids, at least one", lambda value: bool(value) and all(map(whole, value))),
        "first token ids of an encoder-decoder's output, instead of its languages'",
        takes="Sequence[int] | None",
        adapt=_tuple,
        shown="none",
    )
    beams: BeamOptions | None = setting(
        None,
        Range("a number of beams, BeamOptions", lambda value: isinstance(value, BeamOptions)),
        "beam search: number of texts at once, or `BeamOptions`",
        option="--beams",
        takes="BeamOptions | int | None",
        adapt=_beams,
        shown="none",
    )
    guidance_scale: float | None = setting(
        None,
        number(f"0 to {MOST_GUIDANCE}", 0, MOST_GUIDANCE),
        "classifier-free guidance: `negative + scale * (prompt - negative)`; 1 is off",
        set=float,
        shown="off; of pictures the model's",
    )
    negative_prompt: str | tuple[int, ...] | None = setting(
        None,
        _TOKENS,
        "guidance: text or token ids to be unlike",
        set=str,
        takes="str | Sequence[int] | None",
        adapt=_tuple,
        shown="the prompt's last token",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method, None))  # frozen
        check(self)

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
        for name, meant in ELSEWHERE.items():
            if name in changes:
                raise InvalidRequest(f"unknown setting {name!r}", f"did you mean {meant}?")
        return copy_with(self, "setting", changes)


def every_setting() -> Iterator[tuple[Field[Any], Setting]]:
    """Yield all settings of a request, those of its parts included, with their declarations."""
    for kind in (Settings, SamplingParams, DraftOptions, BeamOptions):
        yield from declared(kind)
