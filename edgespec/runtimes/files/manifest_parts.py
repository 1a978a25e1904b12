"""What the manifest says of a model's attention, heads and drafter (``manifest``)."""

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
    Vocab,
    Width,
)
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.formats import Attention, Learnt

MARKOV, EMBEDDING = "markov", "embedding"  # names and kinds of groups beside a drafter's layers
DrafterKind = Literal["eagle", "eagle1", "peagle", "mtp", "dflash", "dspark", "assistant"]


class Fusing(NamedTuple):
    """How a kind of drafter takes in the target's hidden states, and gives its own."""

    joined: bool = False  # the embedding goes through the matrix that fuses them, too
    once: bool = False  # by a round's first step alone; further ones go on without that matrix
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


class AttentionGate(Part):
    """How far an attention format is from exact keys, teacher-forced on text that nothing was learnt from.

    ``perplexity_change``: relative, 0.01 = 1 % higher; ``agreement``: share of equal likeliest tokens.
    """

    perplexity_change: float
    agreement: Share
    passed: bool


class AttentionPart(Part):
    """How native operators keep keys and values of a model: the default, and what coded keys were learnt with.

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
    """How the model's generation_config.json asks for tokens to be chosen; fields as of ``SamplingParams``.

    ``temperature``: None = it does not say whether to sample; 0 = it says not to.
    """

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_VOCAB)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0


class HeadGroup(Part):
    """Heads beside the LM head that a graph can compute from hidden states; one gate switches a group.

    A group turns a row of hidden states after the final norm, h, into ``count`` rows for an LM head:

    * medusa: y_i = h + silu(W_i h + b_i)  (arXiv 2401.10774);
    * blockwise: y_i = h + (W' silu(W h + b) + b')_i, W [inner, hidden], W' [count * hidden, inner]  (arXiv 1811.03115);
    * exit: y = T h, where the residual stream of layer ``layer`` stands in for the last one's  (arXiv 2506.03700).

    Of a drafter, ``markov`` gives no rows but logits, to be added: W2 W1[t] of the token t before, W1 [vocab, inner];
    ``embedding`` is an embedding of its own, where others are given the target's.

    ``own``: each has an LM head of its own; else they share the model's, or the cut one where there is one.
    """

    name: str
    kind: Literal["medusa", "blockwise", "exit", "markov", "embedding"]
    count: Guesses
    inner: int = Field(default=0, ge=0, le=MOST_WIDTH)
    own: bool = False
    layer: Layer = Field(default=0, description="of an exit: layers that have run")


class DecoderPart(Part):
    """A small decoder conditioned on hidden states of the target, which guesses.

    ``kind``: ``eagle``, EAGLE-3 (arXiv 2503.01840); ``peagle`` (arXiv 2602.01469), the same with all guesses in one
    pass: behind the pending token's row stand rows of the token ``mask`` and of ``masked``, a file with what stands for
    hidden states there, float32 [columns - hidden]; ``mtp``, the multi-token prediction layer inside a checkpoint
    (arXiv 2412.19437), which sees the residual stream after the last layer; ``dflash`` (arXiv 2602.06036), whose
    draft cache is made of hidden states alone, and which guesses a block in one pass: its rows are the pending token
    and ``mask`` after it, they see each other, and there were ``block`` of them in training.

    ``dspark`` (arXiv 2607.05147): the same with up to three things more.  With ``anchor`` the pending token's row
    guesses, too: a row guesses the token after its own position.  Heads of kind ``markov`` correct each guess by the
    one before.  ``confidence`` is a file, float32 [1 + hidden + vocab]: the epsilon of the last norm, weights of a row
    after its root mean square is divided out, and what the token before adds; the sigmoid of both is the chance that a
    guess is accepted.

    ``eagle1``, EAGLE-1 and 2 (arXiv 2401.15077), which sees the residual stream after the last layer.  It does not norm
    what its LM head reads; its graph does, by weights of one, so that its logits are to be multiplied by the root mean
    square of the residual stream.

    ``assistant``, Gemma 4's: its layers read keys and values of the target's layers ``reads``.  All steps of a round
    stand where the pending token does and see the tokens before it.

    The others have a draft cache.  Row i of it is made of token i + 1 and of the target's hidden states at token i;
    then it goes on with its own guesses and its own hidden states.

    A row that it is given has ``columns`` columns: first the embedding of its token as the target sees it, then either
    the hidden states of the target's ``tapped`` boundaries, which its first matrix fuses, or its own hidden state.
    """

    kind: DrafterKind
    columns: Width
    block: Guesses | None = None
    mask: Count | None = None
    anchor: bool | None = None
    confidence: InsidePath | None = None
    masked: InsidePath | None = None
    reads: Layers = Field(default_factory=list)

    @property
    def fusing(self) -> Fusing:
        """How it takes in the target's hidden states."""
        return FUSING[self.kind]


class FeaturePart(Part):
    """How sound becomes rows of numbers that an encoder reads: log-mel features, behind windows of two convolutions.

    ``bands``: features of a frame; ``frames``: of a whole recording (its ``most`` rows are half as many).  Row i of the
    encoder's input is made of three parts of ``columns`` each, for the frames p = 2 i - 1, 2 i and 2 i + 1: features of
    the frames p - 1, p and p + 1 one behind the other (zeros outside the recording), then a 1, then zeros.  A part
    whose p is -1 is all zeros.
    """

    bands: Width
    frames: Width
    columns: Width


class SourcePart(Part):
    """What a decoder attends over, computed once a request: the rows that an encoder makes of a source.

    ``kind``: what the encoder reads, token ids of a text or float rows of ``features``.  ``most``: rows of the longest
    source; ``width``: of a row that the encoder gives.  ``shares_encoder``: of a draft that reads what the target's
    encoder gives and has none of its own.  What stands around both texts, ``TextForm`` says.
    """

    kind: Literal["text", "features"]
    most: Context
    width: Width
    features: FeaturePart | None = None
    shares_encoder: bool = False


class FinalNorm(Part):
    """The norm before the LM head, by which the residual stream becomes what embeddings of texts are made of.

    ``file``: its weights, float32 [hidden], and behind them biases if it is ``biased``.  ``centered``: a layer norm,
    which takes the mean away first.
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
