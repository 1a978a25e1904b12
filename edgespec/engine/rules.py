"""Rules of a model on a request: of its generation_config.json, and of codes of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loaded import LoadedBundle
from edgespec.runtimes.audio.spoken import FrameRule
from edgespec.runtimes.images.drawn import CodeTokenConstraint
from edgespec.runtimes.text.rules import RuledText


def with_length(engine: LoadedBundle, settings: Settings, begin: Sequence[int]) -> Settings:
    """Give a request without a length the model's own, if it has one."""
    text = engine.bundle.manifest.text
    if text is None or text.rules.max_length is None or settings.max_new_tokens is not None:
        return settings
    return replace(settings, max_new_tokens=max(1, min(text.rules.max_length, engine.context) - len(begin)))


def sampling_of(engine: LoadedBundle, settings: Settings, prompt: Sequence[int]) -> SamplingParams:
    """Return the sampling of a request, with its grammar and the rules of the model."""
    sampling = settings.sampling
    if settings.grammar is not None:
        constraint = engine.guidance.constraint(settings.grammar, len(prompt))
        sampling = replace(sampling, constraint=constraint)
    sampling = ruled(engine, sampling, settings, prompt)
    return replace(sampling, prompt=len(prompt)) if sampling.counts else sampling


def ruled(engine: LoadedBundle, sampling: SamplingParams, settings: Settings, begin: Sequence[int]) -> SamplingParams:
    """Add the model's own constraints to a request; codes of speech follow each other in a fixed order.

    ``begin``: first tokens of its text.
    """
    manifest, ends = engine.bundle.manifest, frozenset[int]() if settings.ignore_eos else engine.eos
    if (codes := manifest.codes) and codes.sound and list(begin[-len(codes.sound.end) :]) == codes.sound.end:
        return replace(sampling, constraint=FrameRule(codes, manifest.target.facts.vocab, ends, len(begin)))
    if codes and codes.image:
        return replace(sampling, constraint=CodeTokenConstraint(codes, manifest.target.facts.vocab))
    rules = manifest.text.rules if manifest.text is not None else manifest.rules
    if rules is None or not RuledText.needed(rules):
        return sampling
    if settings.ignore_eos:
        rules = rules.model_copy(update={"forced_eos_token_id": None})
    length = min(engine.context, len(begin) + (settings.max_new_tokens or engine.context))
    bound = RuledText(rules, manifest.target.facts.vocab, ends, len(begin), length, sampling.constraint)
    return replace(sampling, constraint=bound)
