"""Write the finished files of a training: heads or a draft, their held-out quality, a picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from edgespec.errors import TrainingError
from edgespec.export.drafters.heads import DESCRIPTION, PUBLISHED, TENSORS, HeadsFile
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.training.layouts import laid_out
from edgespec.export.training.learners import Learner
from edgespec.export.training.loop import History
from edgespec.export.training.options import DRAFTERS, TrainOptions
from edgespec.export.training.self_draft import SelfDraft
from edgespec.export.training.state import DRAFT_REPORT
from edgespec.export.training.target import Source, Target
from edgespec.export.training.windows import Windows
from edgespec.runtimes.files.draft_adapter import DESCRIPTION as SELF_DRAFT
from edgespec.runtimes.files.lora import CONFIG, WEIGHTS


def draw(history: History, path: Path, title: str) -> None:
    """Write a PNG with the loss, and below it the held-out top-1 accuracy of each head."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    above.plot(range(1, len(history.losses) + 1), history.losses, color="#3b7dd8", linewidth=0.8)
    above.set_ylabel("loss, nats")
    above.set_title(title, parse_math=False)  # a $ in a name is a $
    steps = sorted(history.accuracy)
    for head in range(len(history.accuracy[steps[0]]) if steps else 0):
        below.plot(steps, [history.accuracy[step][head] for step in steps], marker="o", label=str(head))
    if steps:
        below.legend(title="head")
    below.set_ylabel("held-out top-1")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


RANKS = 10
TOGETHER = 8  # windows of a pass


def _batches(windows: Windows, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens [B, T] and lengths [B] of windows; the target attends over their sources."""
    for part in windows.parts(TOGETHER):
        target.attend(part.read)
        yield torch.from_numpy(part.tokens).to(target.device), torch.from_numpy(part.lengths).to(target.device)


@torch.no_grad()
def rank_shares(learner: Learner, windows: Windows, start: int = 1) -> list[list[float]]:
    """Return [head][rank]: share of positions where the head's token of that rank is right.

    Args:
        start: given tokens: position ``start - 1`` is the first that is measured.
    """
    hits: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for tokens, lengths in _batches(windows, learner.target):
        for head, (logits, wanted, valid) in enumerate(learner.guesses(tokens, lengths)):
            valid = valid.clone()
            valid[:, : (start - 1) // learner.stride] = False
            best = logits[valid].topk(min(RANKS, logits.shape[-1]), -1).indices  # [n, ranks]
            right = (best == wanted[valid][:, None]).sum(0).cpu()
            hits[head] = hits.get(head, torch.zeros_like(right)) + right
            counts[head] = counts.get(head, 0) + len(best)
    return [[round(int(hit) / max(1, counts[head]), 4) for hit in hits[head]] for head in sorted(hits)]


@torch.no_grad()
def joint_shares(learner: Learner, windows: Windows, start: int = 1) -> list[float]:
    """Return, for each step, the share of positions where a chain is right up to it; 1 + their sum: tokens per round.

    Args:
        start: see ``rank_shares``.
    """
    right: Any = 0
    positions = 0
    for tokens, lengths in _batches(windows, learner.target):
        steps = [(logits.argmax(-1) == wanted, valid) for logits, wanted, valid in learner.guesses(tokens, lengths)]
        whole = torch.stack([valid for _, valid in steps]).all(0)  # [B, N]
        whole[:, : (start - 1) // learner.stride] = False
        so_far = torch.stack([same & whole for same, _ in steps]).cumprod(0)  # [steps, B, N]
        right = right + so_far.sum((1, 2))
        positions += int(whole.sum())
    return [int(count) / max(1, positions) for count in right]


@torch.no_grad()
def draft_acceptance(
    logits_of: Callable[[Tensor], Tensor], target: Target, windows: Windows, start: int = 1
) -> dict[str, float]:
    """Measure how often a draft's tokens would be accepted, teacher-forced.

    Args:
        logits_of: the draft's logits [B, T, vocab] of tokens [B, T].
        windows: text, typically the target's own.
        start: see ``rank_shares``.

    Returns:
        ``overlap``: mean of sum min(p, q), the acceptance rate of speculative sampling at temperature 1 (arXiv
        2211.17192); ``agreement``: share of equal likeliest tokens; ``positions``.
    """
    overlap = agreement = positions = 0.0
    for tokens, lengths in _batches(windows, target):
        valid = torch.arange(tokens.shape[1], device=tokens.device)[None] + 1 < lengths[:, None]
        valid[:, : start - 1] = False
        theirs = target.logits(target.hidden(tokens)[valid])  # [n, V]
        ours = logits_of(tokens)[valid].float()
        overlap += float(torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum())
        agreement += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
        positions += len(ours)
    whole = max(1.0, positions)
    return {"overlap": round(overlap / whole, 4), "agreement": round(agreement / whole, 4), "positions": int(positions)}


Writers = dict[str, Callable[[Path], object]]  # name -> writes the file; the last one completes the folder


def finished_files(learner: Learner, source: Source, report: Mapping[str, Any], options: TrainOptions) -> Writers:
    """Return the files of a finished training.

    Args:
        report: ``training``, and ``ranks`` or ``acceptance``.

    Raises:
        TrainingError: weights beyond float16.
    """
    tensors = {name: _half(name, value.detach().cpu().numpy()) for name, value in learner.tensors().items()}
    if options.method == "draft":
        return _draft(tensors, learner.described(), source, report)
    if isinstance(learner, SelfDraft):
        return _adapter(tensors, learner, source, report, options)
    if options.method in DRAFTERS or options.layout:
        named = laid_out(options, {**tensors}, learner.described(), source)
        weights = PUBLISHED[0] if options.method == "medusa" else "model.safetensors"
        return _described(*named, source, report, weights)
    facts = source.arch.facts
    fields = {"hidden": facts.hidden, "vocab": facts.vocab, **source.fingerprints, **learner.described(), **report}
    file = HeadsFile.model_validate(fields)
    text = json.dumps(file.model_dump(mode="json"), indent=1) + "\n"
    return {TENSORS: _safetensors(tensors), DESCRIPTION: _text(text)}


def _draft(
    tensors: dict[str, NDArray[np.float16]], config: Mapping[str, Any], source: Source, report: Mapping[str, Any]
) -> Writers:
    files: Writers = {}
    for name in TOKENIZER_FILES:
        if name != "config.json" and (source.path / name).is_file():
            files[name] = partial(shutil.copyfile, source.path / name)
    if source.codec.converted:
        files["tokenizer.json"] = _text(source.codec.tokenizer.to_str())
    return files | _described(tensors, config, source, report)


def _adapter(
    tensors: Mapping[str, NDArray[Any]],
    learner: SelfDraft,
    source: Source,
    report: Mapping[str, Any],
    options: TrainOptions,
) -> Writers:
    """Return writers for an adapter as PEFT has it, and for its description, which other programs do not read."""
    files: Writers = {WEIGHTS: _safetensors(tensors)}
    described = learner.draft(source.fingerprints["model"], dict(report))
    files[SELF_DRAFT] = _text(described.model_dump_json(indent=1) + "\n")
    files[CONFIG] = _text(json.dumps(learner.described(), indent=2) + "\n")
    return files


def _described(
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
    source: Source,
    report: Mapping[str, Any],
    weights: str = "model.safetensors",
) -> Writers:
    """Return writers for weights, for their report, and at last for config.json."""
    files: Writers = {weights: _safetensors(tensors)}
    about = {"schema_version": 1, **source.fingerprints, **report}
    files[DRAFT_REPORT] = _text(json.dumps(about, indent=1) + "\n")
    files["config.json"] = _text(json.dumps(config, indent=2) + "\n")
    return files


def _half(name: str, value: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(value, np.float16)
    if not np.isfinite(found).all():
        raise TrainingError(f"tensor {name} has values beyond float16: the training went astray", "use a smaller --lr")
    return found


def _safetensors(tensors: Mapping[str, NDArray[Any]]) -> Callable[[Path], object]:
    return lambda part: save_file(dict(tensors), part, {"format": "pt"})


def _text(content: str) -> Callable[[Path], object]:
    return lambda part: part.write_text(content, "utf-8")
