"""Published drafters; EAGLE-3 in whichever layout: the original, speculators', SpecForge's and SGLang's, and ours.

They differ in names, in what says which hidden states are looked at, and in options; no tensor says which is meant.
Layers are counted here as boundaries: after how many of them the residual stream is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from edgespec.drafters.registry import ASSISTANT, DFLASH
from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.drafters import assistant, dflash
from edgespec.export.drafters.drafter import Drafter, Published, check_size
from edgespec.export.drafters.eagle3 import Eagle3, head_dim_of
from edgespec.export.drafters.heads import CUT, FUSE
from edgespec.export.source.derived import ExtendedCheckpoint, chosen_rows, held, original, rows_of
from edgespec.export.source.source import Checkpoint

# those whose config.json says what they are; what is none of them must be EAGLE-3
PUBLISHED: dict[str, Published] = {ASSISTANT: assistant.PUBLISHED, DFLASH: dflash.PUBLISHED}
TAPS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING, HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
COMPARED = 64  # rows of a copy of the embedding that are looked at


def read_drafter(path: Path, target: Architecture) -> Drafter:
    """Read a drafter and check it against its target.

    Raises:
        ExportError: not a drafter that is known, pickles alone, or one of another model.
    """
    source = _opened(path)
    for kind in PUBLISHED.values():
        if kind.matches(source.config):
            return kind.read(source, target)
    config, said = _configuration(source, target)
    source = ExtendedCheckpoint(Checkpoint(source.path, config, source.tensors, source.notes), {})
    tapped, note = _tapped(source, said, target.facts.layers)
    arch = Eagle3(source, len(tapped), target.facts.context)
    check_size(arch, target)
    check_tensors(arch, arch.source)
    _check_embedding(source, target)
    tokens = _tokens(source, arch)
    return Drafter(arch, tapped, tokens, [note] if note else [])


def _opened(path: Path) -> Checkpoint:
    if path.is_dir() and not any(path.glob("*.safetensors")) and (old := next(path.glob("*.bin"), None)):
        raise ExportError(
            f"{old}: is a pickle, which may run code when it is opened: expected safetensors",
            f'convert it where you trust it: python -c "import torch; from safetensors.torch import save_file; '
            f"save_file({{k: v.contiguous() for k, v in torch.load('{old.name}', weights_only=True).items()}}, "
            f"'model.safetensors')\"",
        )
    return Checkpoint.open(path)


def _configuration(source: Checkpoint, target: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the drafter's configuration in Llama's words, and what it says of hidden states."""
    config = dict(source.config)
    kind = config.get("speculators_model_type") or next(iter(config.get("architectures") or []), "unknown")
    if kind == "eagle3":
        inner = config.get("transformer_layer_config")
        said, config = config, {**config, **(inner if isinstance(inner, dict) else {})}
    elif isinstance(kind, str) and "eagle3" in kind.lower():
        eagle = config.get("eagle_config")
        said = {**config, **(eagle if isinstance(eagle, dict) else {})}
    else:
        raise UnsupportedModel(
            f"{source.path}: {kind!r} is not a drafter that edgespec knows: expected EAGLE-3, as speculators, "
            "SpecForge or its authors write it, DFlash, as its authors or transformers do, or an assistant of Gemma 4",
            "the layer inside a checkpoint needs no folder: --method mtp",
        )
    config["head_dim"] = head_dim_of(source, config.get("num_attention_heads"))
    config["vocab_size"] = target.facts.vocab
    config["draft_vocab_size"] = source.shape(HEAD)[0] if source.has(HEAD) else target.facts.vocab
    config.setdefault("max_position_embeddings", target.facts.context)
    config["num_hidden_layers"] = sum(source.has(f"layers.{at}.mlp.up_proj.weight") for at in range(8)) or 1
    return config, said


def _tapped(source: Checkpoint, said: dict[str, Any], layers: int) -> tuple[tuple[int, ...], str]:
    """Return the boundaries that are looked at, and what was assumed about them."""
    ids, note = said.get(TAPS), ""
    if ids is None:
        ids = [2, layers // 2, layers - 3]
        note = f"the drafter does not say which layers it looks at: taken to be after {ids}, as its authors do"
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ExportError(f"{source.path}: expected {TAPS} to be a list of layers, got {ids!r}")
    if said is not source.config and ids[0] == 1 and "eagle_config" in said and layers >= 8:
        note = f"{TAPS} {ids} are taken to be the layers whose outputs are looked at, as SGLang counts them"
        ids = [each + 1 for each in ids]
    if not all(0 <= each <= layers for each in ids):
        raise ExportError(
            f"{source.path}: looks at the target after layers {ids}, but this model has {layers}",
            "take the drafter that was made for this model",
        )
    fused = source.shape(FUSE) if source.has(FUSE) else (0, 0)
    if fused[1] != len(ids) * fused[0] or not fused[0]:
        raise ExportError(
            f"{source.path}: {FUSE} has shape {list(fused)}: expected [hidden, {len(ids)} * hidden], for layers {ids}",
            "this may be another kind of drafter than EAGLE-3",
        )
    return tuple(ids), note


def _check_embedding(source: Checkpoint, target: Architecture) -> None:
    """Check that a copy of the target's embedding, which is dropped, is one; another would be needed."""
    if not source.has(EMBEDDING):
        return
    rows = slice(0, COMPARED)
    theirs, ours = source.read(EMBEDDING, rows), target.source.read(target.embedding, rows)
    if theirs.shape != ours.shape or not np.allclose(theirs, ours, atol=1e-2 * float(np.abs(ours).max())):
        raise ExportError(
            f"{source.path}: {EMBEDDING} is not the target's embedding",
            "take the drafter that was made for this model, or one without an embedding of its own",
        )


def _tokens(source: Checkpoint, arch: Eagle3) -> NDArray[np.int64] | None:
    """Return what each row of the LM head scores; rows are put in ascending order of their tokens."""
    rows, vocab = source.shape(HEAD)[0], arch.facts.vocab
    if not source.has(OFFSETS):
        if rows != vocab:
            raise ExportError(
                f"{source.path}: the LM head scores {rows} of {vocab} tokens, but no {OFFSETS} says which",
                "take the drafter that was made for this model",
            )
        return None
    with safe_open(source.index[OFFSETS], "np") as file:
        if (kind := file.get_slice(OFFSETS).get_dtype()) not in ("I32", "I64"):
            raise ExportError(
                f"{source.path}: {OFFSETS} is of type {kind}, expected whole numbers (I32, I64)", "download it again"
            )
        tokens = np.arange(rows) + np.asarray(file.get_tensor(OFFSETS), np.int64).reshape(-1)[:rows]
    if len(np.unique(tokens)) != rows or tokens.min() < 0 or tokens.max() >= vocab:
        raise ExportError(
            f"{source.path}: {OFFSETS} names tokens {tokens.min()} to {tokens.max()}, {len(np.unique(tokens))} of "
            f"them: expected {rows} below {vocab}",
            "take the drafter that was made for this model",
        )
    if rows == vocab:
        return None
    order = np.argsort(tokens)
    head = original(source, HEAD)
    ascending = (order == np.arange(rows)).all()
    arch.source = ExtendedCheckpoint(arch.source, {CUT: head if ascending else rows_of(head, order)})
    return tokens[order]


RIDGE = 1e-4  # of the mean square of an input: keeps what the shared tokens do not determine small


def with_tokens(drafter: Drafter, target: Architecture, tokens: NDArray[np.int64]) -> Drafter:
    """Return the drafter with an LM head for other tokens.

    A token that it could not guess gets the row of the target's LM head, through the linear map that takes the target's
    rows of the tokens that it could guess to its own, by least squares.

    Args:
        drafter: what was read; its checkpoint gets another head.
    """
    arch = drafter.arch
    own = np.arange(arch.facts.vocab) if drafter.tokens is None else drafter.tokens  # [D]
    rows = arch.source.read(HEAD if drafter.tokens is None else CUT)  # [D, hidden]
    known = np.isin(tokens, own)
    head = np.empty((len(tokens), arch.facts.hidden), np.float32)
    head[known] = rows[np.searchsorted(own, tokens[known])]
    notes = list(drafter.notes)
    if not known.all():

        def theirs(ids: NDArray[np.int64]) -> NDArray[np.float32]:  # [n] -> [n, hidden]
            return chosen_rows(target.source, target.head.weight, ids, target.facts.hidden).read(slice(None), None)

        x = theirs(own)
        square = x.T @ x
        square += np.float32(RIDGE * np.trace(square) / len(square)) * np.eye(len(square), dtype=np.float32)
        head[~known] = theirs(tokens[~known]) @ np.linalg.solve(square, x.T @ rows)
        notes.append(f"{int((~known).sum())} of the {len(tokens)} tokens that it guesses are new to it: their rows of "
                     "the LM head are the model's, mapped to its own")  # fmt: skip
    arch.source = ExtendedCheckpoint(arch.source, {CUT: held(head)})
    return replace(drafter, tokens=tokens, notes=notes)
