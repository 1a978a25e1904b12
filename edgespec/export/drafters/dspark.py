"""DSpark's drafter (arXiv 2607.05147): DFlash's blocks, corrected one token at a time, with a confidence for each.

With h the normed row of draft token k, and t the token before it (for all except the first a draft token as well)::

    logits = LM head h + W2 W1[t]          the Markov head, of a low rank
    chance = sigmoid(w [h ; W1[t]] + b)    that the token is accepted if all before it are

The pending token's row also predicts, so that a block of 7 rows gives 7 draft tokens; speculators can also leave it
out.  DFlash drafters whose first row predicts (``sample_from_anchor``; ``shift_label`` in SpecForge) are read as DSpark
without these heads.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.formula import FINAL_NORM
from edgespec.export.drafters.dflash import DFlash, assumed_blocks, check_shapes, is_dflash, read_blocks
from edgespec.export.drafters.drafter import Published, flat, kind_of
from edgespec.export.drafters.heads import MARKOV_OUT, MARKOV_TOKENS
from edgespec.export.source.derived import extended, original
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import MARKOV, DrafterKind, HeadGroup

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
SURE, SURE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
ANCHOR = "sample_from_anchor"


class DSpark(DFlash):
    """See the module."""

    model_type = "dspark"
    method: ClassVar[DrafterKind] = "dspark"

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source, tapped, context)
        self.drafter.anchor = self.settings.flag(ANCHOR, True)

    def correct(self, source: Checkpoint) -> None:
        """Load the Markov head and the confidence head, if the configuration lists them."""
        if self.settings.number("selector_rank", 0):
            raise UnsupportedModel(f"{source.path}: a selector of candidates, in a block whose first row guesses")
        rank: int = self.settings.get("markov_rank", source.shape(W1)[1] if source.has(W1) else 0)
        kind = self.settings.get("markov_head_type", "vanilla")
        if kind != "vanilla" and rank:
            raise UnsupportedModel(
                f"{source.path}: a Markov head of the kind {kind!r}, which reads hidden states, too: expected 'vanilla'"
            )
        with_markov = bool(rank) and self.settings.flag("confidence_head_with_markov", True)
        rows, hidden, vocab = self.settings.integer("draft_vocab_size"), self.facts.hidden, self.facts.vocab
        shapes: dict[str, tuple[int, ...]] = {W1: (vocab, rank), W2: (rows, rank)} if rank else {}
        if self.settings.flag("enable_confidence_head", source.has(SURE)):
            shapes |= {SURE: (1, hidden + (rank if with_markov else 0)), SURE_BIAS: (1,)}
        check_shapes(source, shapes)
        if rank:
            self.drafter.heads = (HeadGroup(name=MARKOV, kind="markov", count=1, inner=rank, own=True),)
            self.drafter.scored = (MARKOV_OUT,)
            found = {MARKOV_TOKENS: original(source, W1), MARKOV_OUT: original(source, W2)}
            self.source = extended(self.source, found)
        if SURE in shapes:
            self.drafter.confidence = lambda: self._confidence(source, with_markov)

    def _confidence(self, source: Checkpoint, with_markov: bool) -> NDArray[np.float32]:
        """Return the epsilon of the last norm, weights of a row and what tokens add, [1 + hidden + vocab]."""
        hidden, vocab = self.facts.hidden, self.facts.vocab
        weights, bias = source.read(SURE)[0], source.read(SURE_BIAS)
        tokens = np.full(vocab, bias[0], np.float32)
        if with_markov:
            tokens += source.read(W1) @ weights[hidden:]
        row = weights[:hidden] * self.source.read(f"{FINAL_NORM}.weight")
        return np.concatenate([np.array([self.eps], np.float32), row, tokens]).astype(np.float32)


def is_dspark(source: Checkpoint) -> bool:
    """Whether a checkpoint is of such a drafter: its authors', SpecForge's or speculators'."""
    said = flat(source.config, "dflash_config")
    named = f"{kind_of(source.config)} {said.get('projector_type')}".lower()
    return "dspark" in named or (is_dflash(source) and bool(said.get(ANCHOR) or said.get("shift_label")))


PUBLISHED = Published(
    is_dspark,
    partial(read_blocks, DSpark),
    lambda target: assumed_blocks(DSpark, target, {"block_size": 7, "markov_rank": 256}),
    "a drafter of 5 layers like the model's with a Markov head, as published",
)
