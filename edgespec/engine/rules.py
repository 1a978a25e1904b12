"""Rules of an encoder-decoder's generation_config.json, on a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loaded import LoadedBundle
from edgespec.runtimes.text.rules import RuledText


def with_length(engine: LoadedBundle, settings: Settings, begin: Sequence[int]) -> Settings:
    """Give a request without a length the model's own, if it has one."""
    text = engine.bundle.manifest.text
    if text is None or text.rules.most is None or settings.max_new_tokens is not None:
        return settings
    return replace(settings, max_new_tokens=max(1, min(text.rules.most, engine.context) - len(begin)))


def ruled(engine: LoadedBundle, sampling: SamplingParams, settings: Settings, begin: Sequence[int]) -> SamplingParams:
    """Bind a request by the rules that the model has, beside what else binds it.

    Args:
        engine: of the bundle.
        sampling: how the request's tokens are chosen.
        settings: of the request, its length among them.
        begin: what its text begins with.
    """
    manifest = engine.bundle.manifest
    rules = manifest.text.rules if manifest.text is not None else None
    if rules is None or not RuledText.needed(rules):
        return sampling
    ends = frozenset[int]() if settings.ignore_eos else engine.eos
    if settings.ignore_eos:
        rules = rules.model_copy(update={"forced_end": None})
    length = min(engine.context, len(begin) + (settings.max_new_tokens or engine.context))
    bound = RuledText(rules, manifest.target.facts.vocab, ends, len(begin), length, sampling.constraint)
    return replace(sampling, constraint=bound)
