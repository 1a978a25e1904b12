"""Options of ``edgespec train``, with their defaults, and the ones that shape the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.drafters.registry import has_exits, needing
from edgespec.errors import TrainingError
from edgespec.runtimes.files.manifest import ModelFacts

SELF_DRAFT = "selfdraft"
# over hidden states, or mask rows; training ends by default when it stops improving
DRAFTERS = ("eagle", "dspark", "dflash", "mtp", SELF_DRAFT)
LAST_HIDDEN = ("medusa", "blockwise")  # heads on the last hidden state, of encoder-decoders too
METHODS = (*needing("heads"), "draft", *DRAFTERS)
EXITS = tuple(name for name in METHODS if has_exits(name))
Loss = Literal["kl", "lk", "ce", "d-pace"]
OF_TEXT: tuple[Loss, ...] = ("ce", "d-pace")  # the text says what is right, not the target's distribution
Precision = Literal["no", "bf16", "fp16"]
Layout = Literal["sglang", "speculators", "medusa"]

RATES = {"medusa": 1e-2, "blockwise": 1e-2, **dict.fromkeys(EXITS, 5e-3), "draft": 5e-3,
         "eagle": 4e-3, "dspark": 4e-3, "dflash": 4e-3, "mtp": 2e-3, SELF_DRAFT: 6e-3}  # at width 64  # fmt: skip
HEAD_DECAY = 0.8  # weight of head i in the loss is HEAD_DECAY ** i, as Medusa's authors train
PROMPT = 16  # tokens of a held-out text that are given, not measured
OWN_TEXTS = 1000  # number of texts that the target generates by default
BEGUN = 32  # windows at first, if training ends when it stops improving
MINUTES = 10.0  # time limit, if training ends when it stops improving
MULTIPLE = 32  # sizes of a draft are multiples of it: a block of int4 levels
# these do not change the result, so a resumed training may use others
FREE = (
    "output",
    "threads",
    "save_every",
    "gradient_checkpointing",
    "overwrite",
    "restart",
    "revision",
    "plot",
    "layout",
    "fsdp",
    "answers_from",
    "answers_model",
)


@dataclass(frozen=True)
class TrainOptions:
    """One training.

    Attributes:
        method: heads or drafter to train.
        model: the frozen target: folder, hub id or ``builtin:NAME``.
        output: folder to write.
        data: texts to train on, or sources for an encoder-decoder.
        self_distill: number of texts that the target generates, in addition or instead; without both options it
        generates
            ``OWN_TEXTS``.
        greedy_fraction: fraction of those texts that continues greedily after some sampled tokens.
        heads: draft tokens of medusa and blockwise; training depth in steps of eagle and mtp; mask rows of selfdraft.
        rank: selfdraft: of its matrices.
        own_lm_heads: medusa: each head gets a separate LM head.
        hidden_size: blockwise: width of the hidden layer, eagle: of its MLP; None = heads * hidden, or the target's.
        exits: early exits: after how many layers; empty = about a quarter, half and three quarters.
        draft_layers: of a draft, dspark and dflash.
        draft_hidden, draft_intermediate, draft_heads: shape of the draft; None = about a quarter of the target's width.
        loss: ``kl`` from the target's own distribution, ``lk`` also of their overlap, ``ce`` of the text, ``d-pace``
            weighted by the expected gain of draft tokens.
        ce_share: draft: share of ``ce`` in another loss.
        batch: windows per step, over all processes; None = 16, or 8 if training ends when it stops improving, 2 for
            selfdraft.
        length: tokens of a window; None = 256 or the context.
        epochs: passes over the windows, unless ``steps`` is given; None = 4, or for a drafter until it stops improving.
        steps: optimizer steps.
        lr: peak learning rate; None = the method's.
        warmup: fraction of the steps in which the rate rises; then it falls as a cosine.
        held_out: texts that accuracy is measured on.
        new_tokens: tokens of each held-out text after the prompt.
        minutes: time limit of a drafter's training that ends when it stops improving, generated texts included; unused
            if ``epochs`` or ``steps`` is given.
        precision: of the passes.
        gradient_checkpointing: recompute logits (a draft: also its layers) in the backward pass.
        save_every: steps between checkpoints.
        seed: of everything.
        threads: of torch on a CPU; None = torch's choice.
        overwrite: replace finished heads.
        restart: discard an unfinished training.
        revision: of a hub model.
        plot: a PNG file to write.
        layout: of heads or a drafter: another program's.
        fsdp: the processes share the target's layers.
        answers_from: URL of a server of the target, which answers the prompts in ``data``.
        answers_model: the target's name there; None = the first one that the server lists.
    """

    method: str
    model: str
    output: Path
    data: tuple[Path, ...] = ()
    self_distill: int = 0
    greedy_fraction: float = 0.25
    heads: int = 4
    rank: int = 16
    own_lm_heads: bool = False
    hidden_size: int | None = None
    exits: tuple[int, ...] = ()
    draft_layers: int = 2
    draft_hidden: int | None = None
    draft_intermediate: int | None = None
    draft_heads: int | None = None
    loss: Loss = "kl"
    ce_share: float = 0.0
    batch: int | None = None
    length: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    steps: int | None = None
    lr: float | None = None
    warmup: float = 0.05
    held_out: int = 20
    new_tokens: int = 200
    precision: Precision = "no"
    gradient_checkpointing: bool = False
    save_every: int = 100
    seed: int = 0
    threads: int | None = None
    overwrite: bool = False
    restart: bool = False
    revision: str | None = None
    plot: Path | None = None
    layout: Layout | None = None
    fsdp: bool = False
    answers_from: str | None = None
    answers_model: str | None = None

    @property
    def ends_itself(self) -> bool:
        """Whether the training ends when acceptance has stopped rising, or its time is over."""
        return self.method in DRAFTERS and self.steps is None and self.epochs is None

    @property
    def own_texts(self) -> int:
        """Number of texts that the target generates, without held-out ones."""
        if self.self_distill or self.data:
            return self.self_distill
        return BEGUN if self.ends_itself else OWN_TEXTS

    @property
    def rows(self) -> int:
        """Return the windows per step: fewer if time is short, for more steps."""
        if self.method == SELF_DRAFT:  # whose every step runs the whole model
            return self.batch or 2
        return self.batch or (8 if self.ends_itself else 16)

    @property
    def time(self) -> float:
        """Time limit in minutes of a training that ends when it stops improving."""
        return MINUTES if self.minutes is None else self.minutes

    def identity(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON values that an unfinished training and its resumption must have in common.

        Args:
            facts: fingerprints in place of ``model`` and ``data``, because names do not identify contents.
        """
        kept = {key: value for key, value in asdict(self).items() if key not in (*FREE, "model", "data")}
        return {**kept, "exits": list(self.exits), "answers": self.answers_from is not None, **facts}


ONLY_FOR: dict[str, tuple[str, ...]] = {
    "exits": EXITS,
    "own_lm_heads": ("medusa",),
    "heads": ("medusa", "blockwise", "eagle", "mtp", SELF_DRAFT),
    "rank": (SELF_DRAFT,),
    "hidden_size": ("blockwise", "eagle"),
    "minutes": DRAFTERS,
    "fsdp": tuple(name for name in METHODS if name != "mtp"),  # which copies a layer of the model
    "draft_layers": ("draft", "dspark", "dflash"),
    **dict.fromkeys(("draft_hidden", "draft_intermediate", "draft_heads", "ce_share"), ("draft",)),
}
"""Options that are of use to some methods alone."""
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    **dict.fromkeys(DRAFTERS[:3], ("sglang", "speculators")),
    "mtp": ("speculators",),  # SGLang reads such a layer from the model's own checkpoint
    SELF_DRAFT: ("sglang",),  # random tokens as mask rows
    "medusa": ("medusa",),  # its authors'; SGLang and speculators load none
}


def check_options(options: TrainOptions) -> None:
    """Reject invalid options before anything is loaded."""
    whole = ("heads", "rank", "draft_layers", "held_out", "new_tokens", "save_every")
    optional = (
        "hidden_size",
        "batch",
        "length",
        "steps",
        "threads",
        "draft_hidden",
        "draft_intermediate",
        "draft_heads",
    )
    for name in (*whole, *optional):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise TrainingError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if options.self_distill < 0:
        raise TrainingError(f"--self-distill: expected a number of texts, got {options.self_distill}")
    for name in ("lr", "epochs", "minutes"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise TrainingError(f"--{name}: expected a positive number, got {value}")
    for name in ("greedy_fraction", "ce_share", "warmup"):
        if not 0 <= (value := getattr(options, name)) <= 1:
            raise TrainingError(f"--{name.replace('_', '-')}: expected a share between 0 and 1, got {value}")
    for name, methods in ONLY_FOR.items():
        if getattr(options, name) != getattr(TrainOptions, name) and options.method not in methods:
            option = name.replace("_", "-")
            raise TrainingError(f"--{option} is for {' and '.join(methods)}, not for {options.method}")
    _check_kinds(options)
    if options.answers_model and not options.answers_from:
        raise TrainingError("--answers-model names a model of --answers-from, which is not given")
    if options.answers_from and not options.answers_from.startswith(("http://", "https://")):
        raise TrainingError(f"--answers-from: expected a URL such as http://localhost:8000, got {options.answers_from}")


def _check_kinds(options: TrainOptions) -> None:
    """Reject a loss or a layout of other methods."""
    if options.loss == "d-pace" and options.method not in DRAFTERS:
        raise TrainingError(f"--loss d-pace is for {' and '.join(DRAFTERS)}, not for {options.method}")
    if options.layout and options.layout not in (known := LAYOUTS.get(options.method, ())):
        said = f"expected {' or '.join(known)}" if known else "no other program loads it"
        raise TrainingError(f"--layout {options.layout} is not for {options.method}: {said}")


def window_length(options: TrainOptions, facts: ModelFacts) -> int:
    """Return the number of tokens of a window."""
    length = options.length or min(256, facts.context)
    least = options.heads + 4
    if not least <= length <= facts.context:
        raise TrainingError(
            f"--length: expected {least} to {facts.context} tokens, the model's context, got {length}",
            "choose a --length in this range",
        )
    return length


def choose_exits(wanted: Sequence[int], layers: int) -> tuple[int, ...]:
    """Choose after how many layers the exits are, ascending."""
    if layers < 2:
        raise TrainingError(f"early exits need a model of two layers or more, this one has {layers}")
    exits = tuple(sorted(set(wanted or (round(layers * share / 4) for share in (1, 2, 3)))))
    if not wanted:
        return tuple(at for at in exits if 0 < at < layers)
    if beyond := [at for at in exits if not 0 < at < layers]:
        raise TrainingError(
            f"--exits: expected numbers from 1 to {layers - 1} (the model has {layers} layers), got {beyond[0]}"
        )
    return exits


def choose_taps(layers: int) -> tuple[int, ...]:
    """Choose the layers whose outputs a drafter reads: early, middle and late, as EAGLE-3's authors do."""
    early, late = (2, layers - 3) if layers >= 8 else (1, layers - 1)
    return tuple(sorted({early, layers // 2, late} - {0}))


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft model, in elements."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


def draft_shape(options: TrainOptions, facts: ModelFacts) -> DraftShape:
    """Return the draft's sizes: given, or in the target's proportions."""
    hidden = options.draft_hidden or _up(facts.hidden / 4)
    if hidden % 2:
        raise TrainingError(f"--draft-hidden: expected an even number, got {hidden}")
    heads = options.draft_heads or _heads(hidden, facts.head_dim)
    if hidden % heads or (hidden // heads) % 2:
        raise TrainingError(
            f"--draft-heads: {heads} heads do not divide a width of {hidden} into even parts",
            "choose a --draft-heads that does",
        )
    return DraftShape(
        layers=options.draft_layers,
        hidden=hidden,
        intermediate=options.draft_intermediate or _up(hidden * facts.intermediate / facts.hidden),
        heads=heads,
        kv_heads=_divisor(heads, heads * facts.kv_heads / facts.heads),
        head_dim=hidden // heads,
    )


def learning_rate(options: TrainOptions, hidden: int) -> float:
    """Return the peak learning rate: as given, or the method's, which falls with the width of the learner."""
    return options.lr or RATES[options.method] * math.sqrt(64 / max(64, hidden))


def _up(size: float) -> int:
    return max(1, math.ceil(size / MULTIPLE)) * MULTIPLE


def _heads(hidden: int, head_dim: int) -> int:
    """Choose about width / ``head_dim`` heads, with sizes that attention supports, multiples of 8."""
    most = max(1, hidden // head_dim)
    fitting = [number for number in range(1, most + 1) if hidden % (8 * number) == 0]
    return max(fitting, default=most)


def _divisor(heads: int, wanted: float) -> int:
    return max(number for number in range(1, heads + 1) if heads % number == 0 and number <= max(1, wanted))
