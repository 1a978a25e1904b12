"""Multi-token prediction: the layer inside a checkpoint that predicts one token further (arXiv 2412.19437, 2.2).

Entry i combines token i + 1 with the target's hidden state at token i, after the target's final norm::

    x = fc [norm(embedding) ; norm(hidden)], y = norm(layer(x)), logits = the target's LM head(y)

The layer has the target's architecture.  It continues with its own draft tokens, y being the next step's hidden state.
Embedding and LM head are the target's.  Checkpoints differ in names, and some have the hidden state first.  Speculators
saves a layer that it has trained further as a separate checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture, DrafterSpec
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import FINAL_NORM, HEAD
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import Linear
from edgespec.export.drafters.drafter import Drafter, Published, kind_of
from edgespec.export.drafters.heads import FUSE
from edgespec.export.source.derived import DerivedCheckpoint, ExtendedCheckpoint, Extra, original
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed, with_usual_prefix

EMBEDDED, STATE, TARGET_NORM = "embedding_norm", "hidden_norm", "target_norm"
KEYS = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")  # of config.json: how many there are


@dataclass(frozen=True)
class Layout:
    """Where a family of checkpoints has the layer."""

    at: str  # the prefix of all its tensors
    layer: str  # that of its layer's, below ``at``
    names: Mapping[str, str]  # by our names, after the prefix
    hidden_first: bool = False  # the hidden state comes before the embedding


LAYOUTS = (
    Layout("mtp.", "layers.{}.", {"fc": "fc", EMBEDDED: "pre_fc_norm_embedding", STATE: "pre_fc_norm_hidden",
                                  FINAL_NORM: "norm"}),
    Layout("model.mtp_layers.{}.", "", {"fc": "input_proj", EMBEDDED: "token_layernorm", STATE: "hidden_layernorm",
                                        FINAL_NORM: "final_layernorm"}, hidden_first=True),
)  # fmt: skip
"""Qwen3.5's, which is also transformers' for any decoder; MiMo's."""
DEEPSEEKS = ".eh_proj.weight"
APART = Layout("mtp_layers.{}.", "", LAYOUTS[1].names)
"""Speculators' layout, in a separate checkpoint."""


class Mtp(Architecture):
    """A multi-token prediction layer, as the module describes it; ``mtp_of`` makes one of the target's architecture.

    Args:
        source: tensors by Llama's names, and ``fc``, ``embedding_norm``, ``hidden_norm`` and ``target_norm``.
        hidden_first: the hidden state comes before the embedding.

    Attributes:
        raw: the target's hidden state is taken before its final norm, which no known layout needs.
    """

    hidden_first = raw = False

    def __init__(self, source: Checkpoint, context: int, hidden_first: bool) -> None:
        super().__init__(source)
        self.facts = self.facts.model_copy(update={"context": context})
        self.input_width, self.hidden_first = 2 * self.facts.hidden, hidden_first
        self.drafter = DrafterSpec("mtp")

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        hidden = self.facts.hidden

        def normed(norm: str) -> Value:
            return ops.norm(ops.input_slice(hidden, hidden), self.norm(norm))

        token = ops.norm(ops.input_slice(0, hidden), self.norm(EMBEDDED))

        def taken() -> Value:
            return ops.input_slice(hidden, hidden) if self.raw else normed(TARGET_NORM)

        state = ops.select_input(taken, lambda: normed(FINAL_NORM))
        state = ops.norm(state, self.norm(STATE))
        (x,) = ops.linear(ops.join(*((state, token) if self.hidden_first else (token, state))), Linear(FUSE))
        return ops.head(self.layer(ops, x, 0), self.final_norm, self.head)


def mtp_of(
    target: Architecture, source: Checkpoint, hidden_first: bool = False, said: Mapping[str, Any] | None = None
) -> Mtp:
    """Build the layer with the target's architecture and its configuration for one layer, over the layer's tensors.

    Args:
        said: settings of the layer's checkpoint, which take precedence.
    """
    own, theirs = dict(said or {}), target.source.config
    dropped = ("rope_theta", "rope_scaling") if own else ()
    window = (own.pop("layer_types", None) or [""])[0] == "sliding_attention"
    config: dict[str, Any] = {key: value for key, value in theirs.items() if key not in dropped} | own
    source.config = config | {"num_hidden_layers": 1, "tie_word_embeddings": False,
                              "layer_types": ["sliding_attention" if window else "full_attention"]}  # fmt: skip
    kind = type(target)
    made = cast(type[Mtp], type(f"{kind.__name__}Mtp", (Mtp, kind), {}))
    return made(source, target.facts.context, hidden_first)


def has_mtp(target: Architecture) -> bool:
    """Whether the model's config.json speaks of such a layer."""
    return any(target.source.config.get(key) for key in KEYS)


def planned_mtp(target: Architecture) -> Mtp:
    """Return the layer that a config.json without weights speaks of."""
    if not has_mtp(target):
        raise _missing(target.source, f"config.json has none of {', '.join(KEYS)}")
    return mtp_of(target, ConfigOnly(target.source.path, {}))


def read_mtp(source: Checkpoint, target: Architecture) -> Drafter:
    """Take the layer out of the target's checkpoint.

    Args:
        source: the checkpoint as it is stored.
    """
    layout = next((each for each in LAYOUTS if source.has(_at(each, "fc"))), None)
    if layout is None and (theirs := next((name for name in source.index if name.endswith(DEEPSEEKS)), None)):
        raise UnsupportedModel(
            f"{source.path}: {theirs}: a layer for multi-token prediction as DeepSeek and GLM-4.5 store it, behind the "
            "model's layers, which edgespec does not read",
            "train one: `edgespec train mtp`",
        )
    if layout is None:
        raise _missing(source, f"expected a tensor {' or '.join(_at(each, 'fc') for each in LAYOUTS)}")
    return _read(source, source, layout, target)


def read_apart(source: Checkpoint, target: Architecture) -> Drafter:
    """Read a layer from a separate checkpoint, with the target's architecture."""
    if not source.has(_at(APART, "fc")):
        raise ExportError(f"{source.path}: expected a tensor {_at(APART, 'fc')}", "download it again")
    assert isinstance(target.source, DerivedCheckpoint)
    said = source.config.get("transformer_layer_config") or {}
    kinds = said.get("model_type"), target.source.config.get("model_type")
    if kinds[0] not in (None, kinds[1]):
        raise ExportError(f"{source.path}: a layer of kind {kinds[0]!r}, but the model is of kind {kinds[1]!r}",
                          "take the layer that was made for this model")  # fmt: skip
    return _read(source, target.source.base, APART, target, said)


def _read(
    source: Checkpoint, whole: Checkpoint, layout: Layout, target: Architecture, said: Mapping[str, Any] | None = None
) -> Drafter:
    """Read a layer; ``whole``: the target's checkpoint as it is stored, which has its final norm; ``said``: its own."""
    outer, layers = target.outer_names, (layout.at + layout.layer).format
    names = {f"{outer.get(ours, ours)}.weight": _at(layout, ours) for ours in layout.names}
    others = {*names.values()}
    for name in source.index:
        if name.startswith(layers(0)) and name not in others:
            names[f"{target.layers_at}.0.{name.removeprefix(layers(0))}"] = name
    if any(name.startswith(layers(1)) for name in source.index) or source.has(f"{layout.at}embed_tokens.weight"):
        raise UnsupportedModel(
            f"{source.path}: several layers, or an embedding of its own, below {layout.at.format(0)}: expected one "
            "layer that shares the model's embedding"
        )
    usual = with_usual_prefix(whole, target.layers_at)
    extra: dict[str, Extra] = {
        f"{TARGET_NORM}.weight": original(usual, f"{outer.get(FINAL_NORM, FINAL_NORM)}.weight"),
        f"{outer.get(HEAD, HEAD)}.weight": original(target.source, target.head.weight),
    }
    arch = mtp_of(target, ExtendedCheckpoint(renamed(source, names), extra), layout.hidden_first, said)
    check_tensors(arch, renamed(source, names))
    return Drafter(arch, (target.facts.layers,), None)


def _at(layout: Layout, ours: str) -> str:
    """Return the checkpoint's name of one of our tensors."""
    return f"{layout.at.format(0)}{layout.names[ours]}.weight"


def _missing(source: Checkpoint, why: str) -> ExportError:
    return ExportError(
        f"{source.path}: holds no layer for multi-token prediction: {why}",
        "copies of a model that were converted, quantized or merged often lack it: take the original checkpoint",
    )


PUBLISHED = Published(lambda source: kind_of(source.config) == "mtp", read_apart)
