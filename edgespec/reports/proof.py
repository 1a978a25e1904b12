"""Prove that a bundle's texts are those of its plain decoding: golden vectors, methods, and the files that ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams, adjusted, support
from edgespec.decoding.settings import Settings
from edgespec.decoding.text import INSERTED
from edgespec.drafters.registry import AR
from edgespec.engine.encoding import Source
from edgespec.engine.engine import Engine
from edgespec.engine.input import Input
from edgespec.engine.inputs import Prompt
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.loading import load
from edgespec.engine.rules import ruled
from edgespec.engine.sentences import pieces
from edgespec.errors import BundleError
from edgespec.formulas import agreement
from edgespec.formulas.agreement import first_difference, is_near_tie, verdict_of
from edgespec.planning.profiles import this_machine
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.images import SeenVector
from edgespec.runtimes.files.manifest import GoldenVector
from edgespec.runtimes.images.image import Image, proof_picture
from edgespec.runtimes.ort.native_library import native_library
from edgespec.version import __version__

T = TypeVar("T")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, BRIEF = 8, 16, 32, 8
LINE = 80  # characters of a line that is a source
PICTURE = 32, 256  # pixels: long enough that it is cut into few tiles


def golden_prompts(engine: Engine, text: str) -> Sequence[list[int]]:
    """Take short prompts from a text at even distances, each at the beginning of a line where possible.

    For an encoder-decoder of text they are sources of its maximum length; if it requires languages, they are its first
    ones.  An encoder-decoder of features gets none.
    """
    if (sources := engine.inputs.sources) is not None:
        form, languages = sources.form, list(sources.form.languages)[:2]
        origin = languages[0] if form.needs("from") else None
        target = languages[-1] if form.needs("to") else None
        begin, texts = sources.begin(origin, target), _spread(list(filter(str.strip, text.splitlines())))
        encode = partial(sources.encode, origin=origin, target=target)
        source = engine.bundle.manifest.target.source
        assert source is not None
        most = source.max_rows
        cut = [pieces(line[:LINE], lambda part: len(encode(part)) <= most)[0] for line in texts]
        return [Source.of(encode(line), begin) for line in cut]
    if engine.inputs.sourced:
        return []
    size = min(PROMPT_TOKENS, engine.context // 2)
    lines = [tokens for line in text.splitlines() if len(tokens := engine.codec.encode(line)) >= 4]
    if not lines:  # a text of very short lines: take it as one
        tokens = engine.codec.encode(text)
        lines = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    return [line[:size] for line in _spread(lines)]


def _spread(lines: list[T]) -> list[T]:
    return lines[:: max(1, len(lines) // PROMPTS)][:PROMPTS]


def made_by(engine: LoadedBundle) -> dict[str, str]:
    """Name what determines the bits of plain decoding: native operators, or stock ones with machine and runtime."""
    kind = engine.operators.kind
    if kind == "native":
        return {"operators": kind}
    machine = this_machine()
    made = {"operators": kind, "processor": machine.processor, "onnxruntime": machine.onnxruntime}
    return made | ({"rows": "pairs"} if engine.model.pairs else {})


def why_free(engine: LoadedBundle) -> str:
    """Explain why this engine need not reproduce the bundle's golden vectors; "" = it must, bit for bit."""
    manifest = engine.bundle.manifest
    if engine.device != "cpu":
        return f"device {engine.device} rounds differently"
    # a bundle without this entry was made with the operators that its layout is for
    then: dict[str, str] = manifest.provenance.get("golden") or {"operators": manifest.target.layout}
    for name, now in made_by(engine).items():
        if name not in then:
            return f"the bundle does not say with which {name} they were made"
        if then[name] != now:
            return f"they come from {name} {then[name]}, and this is {now}"
    return ""


def make_golden(
    bundle: Path, text: str, threads: int | None = None, brief: bool = False
) -> tuple[list[GoldenVector], list[SeenVector], dict[str, str]]:
    """Greedy plain decoding, strict -> vectors, those of a picture, what made them (``provenance.golden``).

    Args:
        brief: a few tokens of one prompt, as of weights that were only copied.
    """
    vectors, settings = [], Settings(method=AR, max_new_tokens=BRIEF if brief else NEW_TOKENS)
    # closed, because what loads the bundle next would otherwise map its weights beside these
    with load(bundle, threads=threads, check=False, prompt_cache=False) as engine:
        for prompt in golden_prompts(engine, text)[: 1 if brief else None]:
            given, begin = (list(prompt.tokens), list(prompt)) if isinstance(prompt, Source) else (prompt, None)
            tokens = engine.generate(prompt, settings).tokens
            vectors.append(GoldenVector(prompt=given, prefix_tokens=begin, method=AR, tokens=tokens))
        return vectors, _seen(engine, text), made_by(engine)


def _seen(engine: Engine, text: str) -> list[SeenVector]:
    """Let a model that accepts images continue one and a line of the text."""
    if engine.bundle.manifest.target.image is None or engine.operators.kind != "native" or find_spec("PIL") is None:
        return []
    line = next(filter(str.strip, text.splitlines()), "It is")[:LINE]
    shown: list[str | Image] = [proof_picture(PICTURE), line]
    prompt = engine.encode(shown)
    if len(prompt) + NEW_TOKENS > engine.context:
        return []
    written = engine.generate(prompt, Settings(method=AR, max_new_tokens=NEW_TOKENS)).tokens
    word = engine.bundle.manifest.target.image.prompt_template.id
    return [SeenVector(size=PICTURE, prompt=[word if token >= INSERTED else token for token in prompt],
                       tokens=written)]  # fmt: skip


def check_running(engine: LoadedBundle) -> dict[str, Any]:
    """Compute the digests of all files that an engine runs, without using stored ones.

    Returns:
        for JSON; the keys are stable: how many ``files``, those in the cache among them, and their ``bytes``; version
        of ``onnxruntime``; ``native``: version, instruction set and SHA-256 of the operators, None = stock ones run;
        ``unverified``: unchecked parts, a sentence each.

    Raises:
        BundleError: a file differs from the manifest, or from the record of a conversion; or the native operators
            are of another version than this program.
    """
    files, size = engine.bundle.checked.retake()
    native, library = None, native_library()
    if engine.operators.kind == "native" and library.path is not None:
        if library.version != __version__:
            raise BundleError(
                f"{library.path}: native operators of version {library.version or 'unknown'}: expected {__version__}",
                "install edgespec again, so that they are built again",
            )
        native = {"version": library.version, "isa": library.isa, "sha256": sha256(library.path)}
    return {
        "files": files,
        "bytes": size,
        "onnxruntime": onnxruntime.__version__,
        "native": native,
        "unverified": engine.unverified(),
    }


# A token may differ from plain decoding's only where the two logits are about as close as the rounding of a row
# explains (formulas/agreement.py).
TREE_FACTOR = 2.0  # both logits may move by as much as was measured
NEAR_TIE_FLOOR = 1e-5  # standard deviations of a row
PROBED, TREE_PROBED = 24, 96  # positions
TREE_TEXTS = 8


@dataclass
class Difference:
    """The first place where a method's tokens leave plain decoding's."""

    prompt: int  # number of the prompt
    position: int  # index of the new token
    expected: int  # plain decoding's token
    got: int  # the method's token
    # how much higher the logit (and noise, when sampling) of plain decoding's token is, in standard deviations of the
    # row; infinite where one text only ends before the other
    gap: float
    # whether the gap is within what other kernels' rounding explains, and no later token of the method is further from
    # what plain decoding writes after the same text
    near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, without infinity; the keys are stable."""
        return vars(self) | {"gap": self.gap if math.isfinite(self.gap) else None}


@dataclass
class MethodProof:
    """Results of checking one method."""

    method: str  # its name
    prompts: int = 0  # how many were tried
    tokens: int = 0  # how many tokens were compared
    equal: int = 0  # prompts whose tokens are all equal
    differences: list[Difference] = field(default_factory=list)  # the first difference of each other prompt

    @property
    def exact(self) -> bool:
        """Whether every prompt gave the same tokens."""
        return self.equal == self.prompts

    @property
    def lossless(self) -> bool:
        """Whether every difference is a near-tie."""
        return verdict_of(difference.near_tie for difference in self.differences) != "wrong"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; the keys are stable."""
        found = vars(self) | {"exact": self.exact, "lossless": self.lossless}
        return found | {"differences": [difference.as_dict() for difference in self.differences]}


def prove(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: Settings,
    methods: Sequence[str],
    progress: Callable[[int, int, str], None] | None = None,
) -> list[MethodProof]:
    """Compare every method with plain decoding, token by token, drafting in every round (no fall-back).

    With sampling the settings must be ``coupled`` and seeded: then plain decoding with the same seed is matched too.
    """
    wanted = settings.changed(fallback=False)
    expected = [engine.generate(prompt, wanted, method=AR).tokens for prompt in prompts]
    chains = engine.bundle.manifest.target.foreign or (engine.strict and not engine.exact_rows)
    proofs = []
    for number, name in enumerate(methods):
        proof = MethodProof(name, prompts=len(prompts))
        noise: float | None = None  # of trees, measured at the first difference
        for at, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
            result = engine.generate(prompt, wanted, method=name)
            trees = result.exact is False and (engine.strict or chains)
            proof.tokens += len(text)
            if result.tokens == text:
                proof.equal += 1
            else:
                if trees and noise is None:
                    texts = zip(prompts[:TREE_TEXTS], expected, strict=False)
                    noise = max(_noise(engine, each, written, chains, wanted) for each, written in texts)
                proof.differences.append(_difference(engine, wanted, at, prompt, text, result.tokens, noise or 0.0))
            if progress:
                progress(number * len(prompts) + at + 1, len(methods) * len(prompts), name)
        proofs.append(proof)
    return proofs


def golden_of(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Return the inputs and outputs of the bundle's golden vectors, as far as the context allows.

    Those of pictures are among them where pictures can be read.
    """
    vectors = engine.bundle.manifest.golden
    found: list[tuple[list[int], GoldenVector | SeenVector]]
    found = [
        (one.prompt if one.prefix_tokens is None else Source.of(one.prompt, one.prefix_tokens), one) for one in vectors
    ]
    part = engine.bundle.manifest.target.image
    if vectors and part is not None and engine.operators.kind == "native" and find_spec("PIL") is not None:
        found += [(engine.place(one.prompt, [proof_picture(one.size)]), one) for one in part.proof]
    return [(prompt, one.tokens) for prompt, one in found if len(one.prompt) + len(one.tokens) <= engine.context]


def check_golden(engine: Engine) -> tuple[int, int]:
    """Count the bundle's golden vectors that fit the engine's context -> (reproduced, all), by strict plain decoding.

    None where an attention other than the bundle's default decodes, because its text differs.
    """
    default, exact = default_attention(engine.bundle.manifest.target), ("f32", "f16")
    coded = engine.attention.kv is not None and engine.attention.name not in exact
    if engine.attention.name != default and (coded or default not in exact):
        return 0, 0
    golden = golden_of(engine)
    same = sum(
        engine.generate(prompt, Settings(method=AR, max_new_tokens=len(tokens))).tokens == tokens
        for prompt, tokens in golden
    )
    return same, len(golden)


def _difference(
    engine: Engine,
    settings: Settings,
    number: int,
    prompt: Prompt,
    expected: list[int],
    got: list[int],
    of_trees: float = 0.0,
) -> Difference:
    at = first_difference(expected, got)
    assert at is not None
    if at == min(len(expected), len(got)):  # one is the beginning of the other
        return Difference(number, at, -1, -1, float("inf"), False)
    given = engine.encode(prompt, settings)
    tokens = list(given) + got[:at]
    params, noise = ruled(engine, settings.sampling, settings, list(given)), Noise(settings.sampling.seed)
    slot = engine.open_slot(len(tokens) + len(got) + 2, given)
    slot.prefill(tokens[:-1])
    gaps: list[float] = []
    for token in got[at:]:
        scores = _scores(slot.forward(np.array(tokens[-1:], np.int64)).logits[0], params, noise, tokens)  # [vocab]
        best = scores[expected[at]] if not gaps else scores.max()
        gaps.append(float(best - scores[token]))
        slot.keep([0])
        tokens.append(token)
    limit = max(near_tie_limit(engine, tokens, given), TREE_FACTOR * of_trees)
    # the texts differ from here on, but each later token must still be almost plain decoding's choice after that text
    return Difference(number, at, expected[at], got[at], gaps[0], is_near_tie(gaps, limit))


def near_tie_limit(engine: Engine, tokens: Sequence[int], given: Input | None = None) -> float:
    """Return the largest difference of two logits that is still a near-tie, in standard deviations of a row.

    Measured on this machine: the largest difference between a row in a pass of one row and the same row at the head
    of a block.
    """
    slot = engine.open_slot(given=given)
    probed = list(tokens[-PROBED:])
    largest = 0.0
    for at in range(1, len(probed) - 1):
        block = np.array(probed[at : at + 4], np.int64)
        slot.follow(probed[:at])
        slot.prefill(probed[len(slot.tokens) : at])
        alone = slot.forward(block[:1]).logits[0].copy()
        among = slot.forward(block).logits[0]
        largest = max(largest, float(np.abs(alone - among).max() / alone.std()))
    return agreement.near_tie_limit(largest, NEAR_TIE_FLOOR)


def _noise(engine: Engine, prompt: Prompt, written: Sequence[int], chains: bool, settings: Settings) -> float:
    """Measure how much logits of a text differ, in standard deviations, between trees and single rows.

    The rows of a tree sum up in another order, and the cache carries the difference forward.  With quantized
    activations, a last bit may change a level.  That is rare, but then the difference is hundredths of a deviation.
    ``chains``: for a graph that accepts only chains: four rows per pass instead of row by row.
    """
    given = engine.encode(prompt, settings)
    tokens = [*list(given), *written]
    first = max(1, len(tokens) - TREE_PROBED)
    plain, other = (engine.open_slot(len(tokens) + 8, given) for _ in range(2))
    for slot in (plain, other):
        slot.prefill(tokens[:first])
    largest = 0.0
    for at in range(first, len(tokens) - 3, 4):
        block = np.array(tokens[at : at + 4], np.int64)
        if chains:
            expected = np.empty((4, plain.vocab_size), np.float32)
            for row in range(4):
                expected[row] = plain.forward(block[row : row + 1]).logits[0]
                plain.keep([0])
            rows, kept = other.forward(block).logits, [0, 1, 2, 3]
        else:
            expected = plain.forward(block).logits.copy()  # [4, vocab]
            plain.keep(range(4))
            spread = np.repeat(block, 2)[:-1]  # [7]: before every row but the first a sibling that nothing continues
            spread[1::2] = (block[1:] + 1) % other.vocab_size
            parents = np.array([-1, 0, 0, 2, 2, 4, 4])
            rows, kept = other.forward(spread, parents).logits[::2], [0, 2, 4, 6]
        largest = max(largest, float((np.abs(expected - rows).max(-1) / expected.std(-1)).max()))
        other.keep(kept)
    return largest


def _scores(
    row: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    noise: Noise,
    prefix: Sequence[int],
) -> NDArray[np.float64]:
    """Return float64 [vocab]: scores whose largest plain decoding chooses, in standard deviations of the row."""
    scores = adjusted(row, params, prefix).astype(np.float64)
    if not params.greedy:
        allowed = support(row, params, prefix).ids
        drawn = scores[allowed] + params.temperature * noise.gumbel(len(prefix), allowed)
        scores = np.full(len(row), -np.inf)
        scores[allowed] = drawn
    return scores / float(row.std())
