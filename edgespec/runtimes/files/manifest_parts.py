"""Parts of the manifest (``manifest``): attention, heads and drafter of a model."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, StringConstraints

from edgespec.runtimes.files.bounds import (
    MOST_VOCAB,
    MOST_WIDTH,
    Context,
    Count,
    Guesses,
    Layer,
    Layers,
    Share,
    Tokens,
    Vocab,
    Width,
)
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.formats import Attention, Learnt

MARKOV, EMBEDDING = "markov", "embedding"  # names and kinds of groups that a drafter has next to its layers
Matching = Literal["strings", "tokens"]
DrafterKind = Literal["eagle", "eagle1", "peagle", "mtp", "dflash", "dspark", "assistant"]


class Fusing(NamedTuple):
    """How a kind of drafter reads the target's hidden states, and returns its own."""

    joined: bool = False  # the matrix that fuses the hidden states also multiplies the embedding
    once: bool = False  # only a round's first step uses that matrix; later steps skip it
    unnormed: bool = False  # nothing norms what the LM head reads (``DecoderPart``)


FUSING: dict[DrafterKind, Fusing] = {
    "eagle": Fusing(once=True),
    "eagle1": Fusing(joined=True, unnormed=True),
    "peagle": Fusing(),
    "mtp": Fusing(joined=True),
    "dflash": Fusing(),
    "dspark": Fusing(),
    "assistant": Fusing(joined=True),
}


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or any(odd in path for odd in "\\:\0"):
        raise ValueError(f"path {path!r} leaves the bundle: only relative paths inside the folder are allowed")
    return path


INSIDE = AfterValidator(_inside)
InsidePath = Annotated[str, INSIDE]  # a file of the bundle, which ``files`` lists
FileName = Annotated[InsidePath, StringConstraints(pattern=r"^[\w.-]+\.data$", max_length=255)]


class TranslationPart(Part):
    """How a draft with another tokenizer guesses tokens of the target.

    ``strings``: what it writes is tokenized for the target.  ``tokens``: it guesses only tokens that both have, which
    rejection sampling always does.
    """

    matching: Matching
    tokens: InsidePath = Field(description="int32: the target's token for each of the draft's; negative: none")
    prefix: Tokens = Field(default_factory=list, description="the draft's tokens before a text")
    shared: Count = Field(description="tokens of the draft that the target has too")


class AttentionGate(Part):
    """Distance of an attention format from exact keys, teacher-forced on text that no table was learned from.

    ``perplexity_change``: relative, 0.01 = 1 % higher; ``agreement``: share of equal likeliest tokens.
    """

    perplexity_change: float
    agreement: Share
    passed: bool


class AttentionPart(Part):
    """How native operators store a model's keys and values: the default, and the tables of coded keys.

    ``tables``: a safetensors file with the entries ``learnt`` (docs/attention.md); ``gates``: by attention, measured on
    ``positions`` positions with up to ``depth`` tokens before them.
    """

    default: Attention
    tables: InsidePath | None = None
    learnt: list[Learnt] = Field(default_factory=list)
    gates: dict[Attention, AttentionGate] = Field(default_factory=dict)
    positions: Count = 0
    depth: Count = 0
    text: str | None = None
    text_sha256: str | None = None


class SamplingPart(Part):
    """How the model's generation_config.json says to choose tokens; see ``SamplingParams`` for the fields.

    ``temperature``: None = it does not say whether to sample; 0 = it says not to.
    """

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_VOCAB)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0


class HeadGroup(Part):
    """Heads that a graph can compute from hidden states, in addition to the LM head; one gate switches a group.

    A group turns a row of hidden states after the final norm, h, into ``count`` rows for an LM head:

    * medusa: y_i = h + silu(W_i h + b_i)  (arXiv 2401.10774);
    * blockwise: y_i = h + (W' silu(W h + b) + b')_i, W [inner, hidden], W' [count * hidden, inner]  (arXiv 1811.03115);
    * exit: y = T h, with the residual stream of layer ``layer`` instead of the last one's  (arXiv 2506.03700).

    Two kinds belong to drafters.  ``markov`` gives logits to add, not rows: W2 W1[t] of the previous token t, W1
    [vocab, inner].  ``embedding`` is the drafter's embedding; other drafters receive the target's.

    ``own``: each head has a separate LM head; otherwise they share the model's, or the pruned one if it exists.
    """

    name: str
    kind: Literal["medusa", "blockwise", "exit", "markov", "embedding"]
    count: Guesses
    inner: int = Field(default=0, ge=0, le=MOST_WIDTH)
    own: bool = False
    layer: Layer = Field(default=0, description="of an exit: layers that have run")


class SelectorPart(Part):
    """Low-rank scores of pairs of draft tokens (DFlash 2).

    After the previous token t, a candidate b for a draft token has the score ``logit(b) + (A[t] * P h) B[b]``, where h
    is its row after the last norm.  Only the ``candidates`` with the highest logits have one.

    ``file``: float16 [hidden + 2 * vocab, rank]: the columns of P times the weights of the last norm, whose epsilon is
    ``eps``, A and B.
    """

    file: InsidePath
    rank: Width
    candidates: Count
    eps: Annotated[float, Field(ge=0, le=1)]


class DecoderPart(Part):
    """A small decoder conditioned on hidden states of the target, which drafts tokens.

    ``kind``: ``eagle``, EAGLE-3 (arXiv 2503.01840).  ``peagle`` (arXiv 2602.01469) drafts the same in one pass.
    After the pending token's row it has rows of the token ``mask`` and of ``masked``: a file, float32 [columns -
    hidden], that replaces hidden states there.  ``mtp``, the multi-token prediction layer inside a checkpoint (arXiv
    2412.19437), reads the residual stream after the last layer.  ``dflash`` (arXiv 2602.06036) drafts a block in one
    pass, and its draft cache is computed only from hidden states.  Its rows are the pending token and ``mask`` after
    it.  They see each other, and training had ``block`` of them.  A ``selector`` (DFlash 2) chooses each draft token by
    the one before.

    ``dspark`` (arXiv 2607.05147) adds up to three things.  With ``anchor`` the pending token's row also drafts: a row
    drafts the token after its own position.  Heads of kind ``markov`` correct each draft token by the previous one.
    ``confidence`` is a file, float32 [1 + hidden + vocab]: the epsilon of the last norm, weights of a row divided by
    its root mean square, and the summand of the previous token.  The sigmoid of the sum is the chance that a draft
    token is accepted.

    ``eagle1``, EAGLE-1 and 2 (arXiv 2401.15077), reads the residual stream after the last layer.  It does not normalize
    the input of its LM head.  Its graph does, with weights of one, so its logits must be multiplied by the root mean
    square of the residual stream.

    ``assistant``, Gemma 4's: its layers read keys and values of the target's layers ``reads``.  All steps of a round
    have the pending token's position and see the tokens before it.

    The others have a draft cache.  Row i of it is computed from token i + 1 and the target's hidden states at token i;
    later steps use draft tokens and the drafter's own hidden states.

    An input row has ``columns`` columns: first the embedding of its token as the target sees it, then either the hidden
    states of the target's ``aux_hidden_layers``, which its first matrix fuses, or its own hidden state.
    """

    kind: DrafterKind
    columns: Width
    block: Guesses | None = None
    mask: Count | None = None
    anchor: bool | None = None
    confidence: InsidePath | None = None
    masked: InsidePath | None = None
    selector: SelectorPart | None = None
    reads: Layers = Field(default_factory=list)

    @property
    def fusing(self) -> Fusing:
        """How it reads the target's hidden states."""
        return FUSING[self.kind]


class FeaturePart(Part):
    """How sound becomes rows for an encoder: log-mel features, as windows for two convolutions.

    ``bands``: features of a frame; ``frames``: of a whole recording (its ``max_rows`` rows are half as many).  Row i of
    the encoder's input has three parts of ``columns`` each, for the frames p = 2 i - 1, 2 i and 2 i + 1.  A part has
    the features of the frames p - 1, p and p + 1 in sequence (zeros outside the recording), then a 1, then zeros.  A
    part whose p is -1 is all zeros.
    """

    bands: Width
    frames: Width
    columns: Width


class SourcePart(Part):
    """The rows that a decoder attends over, which an encoder computes from a source once per request.

    ``kind``: the encoder's input, token ids of a text or float rows of ``features``.  ``max_rows``: rows of the longest
    source; ``width``: of a row that the encoder gives.  ``shares_encoder``: a draft reads the output of the target's
    encoder and has none itself.  ``TextForm`` has the tokens around both texts.
    """

    kind: Literal["text", "features"]
    max_rows: Context
    width: Width
    features: FeaturePart | None = None
    shares_encoder: bool = False


class FinalNorm(Part):
    """The norm before the LM head, which turns the residual stream into input for embeddings of texts.

    ``file``: its weights, float32 [hidden], then biases if it is ``biased``.  ``centered``: a layer norm, which
    subtracts the mean first.
    """

    file: InsidePath
    eps: Share
    centered: bool = False
    biased: bool = False


class HeadVocab(Part):
    """The tokens that a cut LM head scores, in the order of its rows.

    ``file``: their ids, little-endian int32 [size], ascending.  Other tokens are never guessed, which is lossless.
    """

    file: InsidePath
    size: Vocab
