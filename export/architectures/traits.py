"""What is special about one model, in words, for people who want to know before an export."""

from __future__ import annotations

from edgespec.export.architectures.base import Architecture


def traits(arch: Architecture) -> list[str]:
    """What sets a model apart from a plain Llama, as far as decoding is concerned."""
    facts, rules = arch.facts, [arch.rule(at) for at in range(arch.facts.layers) if at not in arch.facts.convolutions]
    found = [f"text half alone of a model that reads {arch.text_half_of}"] if arch.text_half_of else []
    found.append("tied embeddings" if facts.tied else "untied LM head")
    if facts.heads * facts.head_dim != facts.hidden:
        found.append(f"{facts.heads} heads of {facts.head_dim} in {facts.hidden}")
    if facts.convolutions:
        where = f"{len(facts.convolutions)} of {facts.layers} layers"
        found.append(f"short convolutions of {facts.taps} tokens in {where}")
        if heads := facts.delta:
            sizes = f"{heads.values} states of {heads.key_dim} x {heads.value_dim}"
            found.append(f"{heads.kind} in {where}, each with {sizes}")
    if any("output_gate_proj" in name for name in arch.tensors):
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
        found.append("learned positions" if arch.positions else f"{without} layers without positions")
    if rules[0].q_norm:
        found.append("norms of each head after rotation" if rules[0].late_norms else "norms of each head")
    for rotary in arch.rotaries.values():
        if rotary.growth(facts.context) is not None:
            found.append(f"queries grow beyond position {rotary.parameters['original_max_position_embeddings']}")
    if arch.head.bias:
        found.append("LM head with a bias")
    if cap := rules[0].cap:
        found.append(f"scores capped at {cap:g}")
    if arch.logits.cap:
        found.append(f"logits capped at {arch.logits.cap:g}")
    return found
