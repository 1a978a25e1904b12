"""Special features of one model, and differences of a bundle from its source in every format."""

from __future__ import annotations

import copy

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.rules import AttentionRule
from edgespec.export.architectures.seq2seq import EncoderDecoder


def traits(arch: Architecture) -> list[str]:
    """List differences of a model from a plain Llama that matter for decoding."""
    rules = [arch.rule(at) for at in range(arch.facts.layers) if at not in arch.facts.convolutions]
    return [*_sizes(arch), *_windows_and_rotations(arch, rules), *_scores(arch, rules[0])]


def _sizes(arch: Architecture) -> list[str]:
    facts = arch.facts
    found = [f"text half alone of a model that reads {arch.text_half_of}"] if arch.text_half_of else []
    if arch.encoder is not None:
        inner, reads = arch.encoder.facts, "rows of sound" if arch.encoder.input_width else "tokens"
        found.append(
            f"encoder of {inner.layers} layers with {inner.heads} heads, which reads up to {inner.context} {reads}"
        )
    if arch.sight is not None:
        tower, most = arch.sight.tower.facts, arch.sight.image.max_rows
        found.append(f"reads images: a tower of {tower.layers} layers with {tower.heads} heads, up to {most} rows each")
    if arch.hearing is not None and arch.hearing.sound is not None:
        tower, most = arch.hearing.tower.facts, arch.hearing.sound.max_rows
        found.append(f"hears: a tower of {tower.layers} layers with {tower.heads} heads, up to {most} rows a recording")
    found.append("tied embeddings" if facts.tied else "untied LM head")
    if facts.heads * facts.head_dim != facts.hidden:
        found.append(f"{facts.heads} heads of {facts.head_dim} in {facts.hidden}")
    if facts.convolutions:
        where = f"{len(facts.convolutions)} of {facts.layers} layers"
        found.append(f"short convolutions of {facts.taps} tokens in {where}")
        if heads := facts.delta:
            sizes = f"{heads.values} states of {heads.key_dim} x {heads.value_dim}"
            found.append(f"{heads.kind} in {where}, each with {sizes}")
    if arch.on(arch.output_gate):
        found.append("gates on the output of attention")
    if facts.head_dims:
        found.append(f"heads of {' and '.join(map(str, sorted(set(facts.head_dims))))}")
    if facts.shared:
        found.append(f"{facts.shared} of {facts.layers} layers read keys and values of earlier ones")
    if mixed := facts.experts:
        found.append(
            f"{mixed.chosen} of {mixed.count} experts of {mixed.inner} in {len(mixed.layers)} of {facts.layers} layers"
            + (f", {mixed.always} of them for every token" if mixed.always else "")
        )
    if facts.layer_embedding:
        found.append(f"embeddings of {facts.layer_embedding} in each layer, read from the file row by row")
    return found


def _windows_and_rotations(arch: Architecture, rules: list[AttentionRule]) -> list[str]:
    facts, found = arch.facts, []
    for size in sorted({rule.window for rule in rules} - {0}):
        found.append(f"windows of {size} in {sum(rule.window == size for rule in rules)} of {facts.layers} layers")
    for name, rotary in arch.rotaries.items():
        kind = rotary.parameters["rope_type"]
        if kind == "longrope":
            trained = int(rotary.parameters["original_max_position_embeddings"])
            kind += f", {'long' if facts.context > trained else 'short'} factors for a context of {facts.context}"
            kind += f" (long ones beyond {trained}: --context chooses)"
        if kind != "default" or name != "rope":
            used = sum(rule.rotary == name for rule in rules)
            found.append(f"{kind} rotation in {used} of {facts.layers} layers")
    if "rope" in arch.rotaries and arch.rotaries["rope"].dims < facts.head_dim:
        found.append(f"{arch.rotaries['rope'].dims} of {facts.head_dim} channels rotated")
    if without := sum(rule.rotary is None for rule in rules):
        found.append(_positions(arch, rules[0]) or f"{without} layers without positions")
    return found


def _positions(arch: Architecture, rule: AttentionRule) -> str:
    """Name the positions of models without rotation; "" = none."""
    if rule.relative is not None:
        return f"biases by distance, up to {rule.relative.distance}"
    if isinstance(arch, EncoderDecoder) and arch.placed != "learnt":
        return "sinusoids as positions"
    return "learned positions" if arch.positions else ""


def _scores(arch: Architecture, rule: AttentionRule) -> list[str]:
    found = []
    if rule.q_norm:
        found.append("norms of each head after rotation" if rule.late_norms else "norms of each head")
    for rotary in arch.rotaries.values():
        if rotary.growth(arch.facts.context) is not None:
            found.append(f"queries grow beyond position {rotary.parameters['original_max_position_embeddings']}")
    if arch.head.bias:
        found.append("LM head with a bias")
    if rule.cap:
        found.append(f"scores capped at {rule.cap:g}")
    if arch.logits.cap:
        found.append(f"logits capped at {arch.logits.cap:g}")
    return found


def approximations(arch: Architecture) -> list[str]:
    """List differences from the source model in every format, for ``Result.approximations``."""
    found = [f"text alone: the source model also reads {arch.text_half_of}"] if arch.text_half_of else []
    if short := _short_texts(arch):
        found.append(
            f"the rotation of texts beyond {short} tokens for shorter ones, too: transformers changes it by length"
        )
    return found


def remedies(arch: Architecture) -> list[str]:
    """List hints about differences of rotations for an export."""
    if not (short := _short_texts(arch)):
        return []
    return [
        f"texts of up to {short} tokens come out otherwise than in transformers, because the rotation for longer ones "
        f"serves them, too: --context {short} exports with the one for such texts"
    ]


def as_used_for(arch: Architecture, length: int) -> Architecture:
    """Return the source as transformers runs it on a text of ``length`` tokens; ``arch`` itself if it is the same."""
    if length > _short_texts(arch):
        return arch
    made = copy.copy(arch)
    made.facts = arch.facts.model_copy(update={"context": length})
    return made


def _short_texts(arch: Architecture) -> int:
    """Return the longest text that transformers rotates otherwise than an export of this context does; 0 = none.

    Transformers takes LongRoPE's short factors up to the length first trained on, and stretches the base of dynamic
    scaling by the text's length beyond the model's limit (``modeling_rope_utils.dynamic_rope_update``).
    """
    lengths = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    chosen = (one.parameters for one in arch.rotaries.values() if one.parameters["rope_type"] in lengths)
    short = max((int(found[lengths[found["rope_type"]]]) for found in chosen), default=0)
    return short if arch.facts.context > short else 0
