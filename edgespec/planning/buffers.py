"""Bytes of buffers and results of passes: keys and values, activations, rows of logits."""

from __future__ import annotations

from edgespec.drafters.registry import AR
from edgespec.runtimes.audio.features import HOP
from edgespec.runtimes.files.attention import default_attention, exact_attention, with_copy
from edgespec.runtimes.files.formats import KV_BLOCK
from edgespec.runtimes.files.kv import ATTENTION, KvFormat, checkpoint_bytes, padded_dim, state_width
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.sound import ConformerFrontend, SoundPart, WhisperFrontend
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.slots.encoder import encoder_attention
from edgespec.runtimes.slots.slot import ROUND_CAPACITY
from edgespec.runtimes.slots.text_encoder import ROWS, TEXTS

READ = 3 * 4 + 2  # bytes of a number that a pass over given rows reads
HUGE = 2 << 20  # numpy asks for huge pages for arrays of twice this: a page that is touched is as large
SPLIT = 4 * KV_BLOCK  # tokens per piece of attention (native/attention.cpp)
TILE = 16
ACT = 48  # bytes of 32 quantized activations (native/layout.h)
QUERY = 48  # bytes of attention's state per query, without its numbers (native/kernels.h)
TRIED = 384  # tokens that a new slot has room for
DRAWN = 7  # rows of float64 for sampling a token
PROBED = 5  # rows whose logits are compared to say whether rows are exact, and that control times


def blocks(tokens: int) -> int:
    """Tokens of whole blocks of keys and values."""
    return -(-tokens // KV_BLOCK) * KV_BLOCK


def source_rows(part: ModelPart, context: int) -> int:
    """Rows of a source that is planned for: a recording of maximum length, a text as long as the context."""
    assert part.source is not None
    return part.source.max_rows if part.source.kind == "features" else min(part.source.max_rows, context)


def working_bytes(encoder: ModelPart, kv: KvFormat, rows: int) -> int:
    """Bytes of keys and values of one layer of a pass over a source, and of the rows that it gives, twice."""
    one = encoder.facts.model_copy(update={"layers": 1, "head_dims": []})
    return kv.nbytes(one, blocks(rows)) + 2 * 4 * rows * encoder.facts.hidden


def texts_bytes(encoder: ModelPart, use: RunOptions) -> tuple[int, str]:
    """(bytes of keys and values of a pass over texts, and of the rows that it gives; what they are for)."""
    tokens = min(use.context, encoder.facts.context)
    rows, kv = max(ROWS, tokens), ATTENTION[use.attention] if use.attention else encoder_attention(encoder)
    one = encoder.facts.model_copy(update={"layers": 1, "head_dims": []})
    held = max(TEXTS * kv.nbytes(one, blocks(1)), kv.nbytes(one, blocks(tokens)))
    return held + (2 * 4 + 8) * rows * encoder.facts.hidden, f"one layer of {TEXTS} texts, and rows"


def heard_bytes(sound: SoundPart, convolutions: list[ModelPart], rows: int) -> int:
    """Bytes of the inputs of an audio encoder and of its convolutions, and of the latter's outputs.

    A row is stored in an array, in the buffer of the pass, in its scratch, and in the form that is multiplied.
    """
    front = sound.front
    if isinstance(front, WhisperFrontend):
        return READ * rows * 3 * front.features.columns
    found = READ * rows * front.halved(front.bands) * convolutions[-1].facts.hidden
    for at, one in enumerate(convolutions):
        width = one.facts.hidden
        found += one.facts.context * (READ * 9 * (width if at else 1) + 2 * 4 * width)
    return found


def conformer_bytes(front: ConformerFrontend, tower: ModelPart, rows: int) -> int:
    """Bytes of a conformer's pass that ``native_scratch`` does not count, and of the recording and its features.

    Inputs and outputs of its matrices are float32 buffers, because they are clamped: of two MLPs, of attention with a
    matrix more, and of a convolution.
    """
    facts = tower.facts
    floats = facts.intermediate + 3 * facts.heads * facts.head_dim + 13 * facts.hidden
    frames = rows << front.convolutions
    heard = 4 * (5 * frames * HOP + 2 * frames * front.bands)  # samples and their copies, features and a copy
    return rows * (4 * floats + 2 * _act_bytes(tower, facts.hidden)) + heard


def model_kv(part: ModelPart, use: RunOptions, draft: bool) -> KvFormat:
    """How a model's native cache is kept; a draft's as exactly as its weights allow."""
    if draft:
        return ATTENTION[exact_attention(part)]
    return with_copy(ATTENTION[use.attention or default_attention(part)], use.draft_attention)


def kv_bytes(part: ModelPart, use: RunOptions, native: bool, draft: bool = False) -> tuple[int, str]:
    """(resident bytes of keys and values when the contexts of a batch are full, their parts)."""
    facts, tokens = part.facts, min(use.context, part.facts.context)
    room = tokens + part.extra_rows
    if native:
        kv = model_kv(part, use, draft)
        there = use.batch * kv.nbytes(facts, blocks(room))
        # the slots of a batch share one array, each with spare room after its tokens
        used = use.batch * kv.nbytes(facts, tokens)
        # the probe of exact rows uses a separate slot if all others are a batch's
        tried = kv.nbytes(facts, min(room, TRIED)) if use.batch > 1 and use.method != AR and not draft else 0
        return _touched(used, there, use.batch) + tried, f"keys {kv.keys}, values {kv.values}"
    capacity = -(-room // ROUND_CAPACITY) * ROUND_CAPACITY
    row = facts.kv_heads * facts.head_dim * 4
    arrays = 2 * facts.layers * use.batch
    return arrays * _touched(row * tokens, row * capacity, facts.kv_heads), "float32"


def _touched(used: int, there: int, pieces: int) -> int:
    """Resident bytes of an array that was partly written, in this many pieces."""
    return used if there < 2 * HUGE else min(there, used + pieces * HUGE // 2)


def checkpoint_bytes_of(part: ModelPart, use: RunOptions) -> int:
    """Bytes of a checkpoint of the target's states; 0 = none are taken: no states, or coded keys."""
    return 0 if model_kv(part, use, False).ring else checkpoint_bytes(part.facts)


def native_scratch(part: ModelPart, use: RunOptions, rows: int, draft: bool = False) -> int:
    """Bytes of the largest pass of native operators (native/pass.h, Scratch): the prefill's."""
    facts, form = part.facts, part.format
    tokens = min(use.context, facts.context)
    attended, dim = facts.heads * max(facts.dims, default=facts.head_dim), padded_dim(facts)
    floats = facts.hidden + attended + (facts.intermediate if form == "w8a8" else 0)
    if heads := facts.delta:  # inputs and outputs of the rule, and of its convolution, also of the last pass
        inner = max(heads.values * heads.value_dim, attended)
        floats += heads.mixed + 2 * inner + 2 * heads.values + 2 * state_width(facts)
    elif facts.convolutions:
        floats += 4 * facts.hidden
    floats += facts.hidden + 2 * facts.layer_embedding if facts.layer_embedding else 0
    if mixed := facts.experts:  # rows among those sent to experts: inputs, intermediate values and outputs
        floats += mixed.chosen * (facts.hidden + mixed.inner) + mixed.count
        floats += mixed.chosen * (_act_bytes(part, facts.hidden) + _act_bytes(part, mixed.inner)) // 4
    acts = sum(_act_bytes(part, width) for width in (facts.hidden, attended, facts.intermediate))
    coded = model_kv(part, use, draft).keys in ("nomad1", "nomad2")
    query = facts.heads * (QUERY + dim * (4 + 1 + (16 if coded else 0)))
    splits = -(-tokens // SPLIT)
    partial = facts.heads * splits * (dim + TILE) * 4 if splits else 0
    return rows * (4 * floats + acts + query + partial)


def _act_bytes(part: ModelPart, width: int) -> int:
    """Bytes of a row of activations, in the form that matrices multiply."""
    return 4 * width if part.format == "fp32" else -(-width // 64) * 2 * ACT


def stock_scratch(part: ModelPart, use: RunOptions, rows: int) -> int:
    """Bytes of the largest pass of stock operators, in ONNX Runtime's arena: the activations of a layer.

    Attention adds nothing that grows with the text, which ONNX Runtime 1.31 computes in tiles, unless heads are wide:
    then it keeps the scores of all heads (docs/dev/runtime.md).
    """
    facts = part.facts
    attended = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
    activations = 4 * facts.hidden + 3 * attended + 3 * facts.intermediate
    whole = any(graph.min_length for graph in part.graphs.values())
    scores = facts.heads * min(use.context, facts.context) if whole else 0
    return 4 * (rows + 1) * (activations + scores)  # and the dummy row of a gated graph


def logits_bytes(part: ModelPart, use: RunOptions, native: bool, draft: bool, groups: list[str]) -> int:
    """Bytes of rows of logits, of their copies for sampling, and of a group of heads.

    Native operators return only the best tokens of heads.
    """
    facts, cut = part.facts, part.head_vocab.size if part.head_vocab else part.facts.vocab
    drafts = use.method != AR
    rows = PROBED if drafts else 0
    if not (native and use.greedy):
        rows = max(rows, use.gamma + 1 if drafts else 1)
    # float64: a row's logits for its distribution, and the drafter's distribution of every guess
    drawn = 0 if use.greedy or draft else DRAWN + (use.gamma if drafts else 0)
    heads = 0 if native else max((group.count for group in part.heads if group.name in groups), default=0)
    return 4 * rows * (cut if part.cut else facts.vocab) + 8 * drawn * facts.vocab + 4 * heads * cut
