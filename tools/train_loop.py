"""Train embedded encoder-decoders for a number of minutes, and save them small: shared by the training scripts."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedModel

Batch = TypeVar("Batch")
RATE, WARM_UP, REPORT_S = 3e-3, 0.02, 20.0
WORKERS = max(1, (os.cpu_count() or 1) - 2)  # processes that make batches for a GPU


@dataclass(frozen=True)
class Plan:
    """How long to train, and where.

    Attributes:
        minutes: of training; rates fall to 0 over them.
        state: a file with the state of an interrupted training.
        device: "cuda" or "cpu".
        rate: factor of the rates; less than 1 to continue from trained weights.
    """

    minutes: float
    state: Path
    device: str
    rate: float = 1.0


class _Stream(IterableDataset[Batch]):  # type: ignore[misc]
    def __init__(self, make: Callable[[int], Iterable[Batch]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        yield from self.make(worker.id if worker else 0)


def ahead(make: Callable[[int], Iterable[Batch]], device: str) -> Iterator[Batch]:
    """Have processes make batches without end; ``make`` is given a process's number, for its seed."""
    return iter(DataLoader(_Stream(make), batch_size=None, num_workers=WORKERS if device == "cuda" else 0))


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) over all matrices of a shape at once.

    It does what ``torch.optim.Muon`` does; on a GPU, matrices of a small model one by one take half of a step.
    """

    def __init__(self, matrices: list[torch.Tensor], lr: float, decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        group = self.param_groups[0]
        shapes: defaultdict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for one in group["params"]:
            shapes[one.shape].append(one)
        for shape, same in shapes.items():
            slope = torch.stack([one.grad for one in same])
            state = self.state[same[0]]
            mean = state.setdefault("mean", torch.zeros_like(slope)).lerp_(slope, 1 - group["momentum"])
            change = _orthogonal(slope.lerp(mean, group["momentum"])) * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(same, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(same, list(change.unbind()), alpha=-group["lr"])


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:  # [n, r, c]
    """Bring singular values close to 1 by five steps of Newton and Schulz's method, with Jordan's coefficients."""
    turned = matrices.bfloat16() if matrices.shape[1] <= matrices.shape[2] else matrices.bfloat16().mT
    turned = turned / turned.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = turned @ turned.mT
        turned = 3.4445 * turned + (-4.775 * square + 2.0315 * square @ square) @ turned
    return (turned if matrices.shape[1] <= matrices.shape[2] else turned.mT).to(matrices.dtype)


def optimise(
    model: torch.nn.Module,
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
    validate: Callable[[], str],
    plan: Plan,
) -> None:
    """Train by Muon (matrices of layers) and AdamW (the rest) until the minutes are over; resume where they ended."""
    torch.set_float32_matmul_precision("high")  # TensorFloat-32 on a GPU: fewer small steps than bfloat16 and casts
    model.to(plan.device)
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    inside = [value for name, value in named if ".block." in name or ".layers." in name]
    matrices = [value for value in inside if value.dim() == 2 and min(value.shape) > 16]
    rest = [value for _, value in named if not any(value is one for one in matrices)]
    fused = plan.device == "cuda"
    optimisers = (
        Muon(matrices, lr=7 * RATE),
        torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    )
    before, step = _resumed(model, optimisers, plan)
    began = reported = time.monotonic()
    losses: list[torch.Tensor] = []
    while (elapsed := before + time.monotonic() - began) < 60 * plan.minutes:
        share = elapsed / (60 * plan.minutes)
        for one, rate in zip(optimisers, (7 * RATE, RATE), strict=True):
            one.param_groups[0]["lr"] = plan.rate * rate * min(1.0, share / WARM_UP + 0.01) * (1.01 - share)
        model.train()
        loss = loss_of(next(batches))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([value for _, value in named], 1.0)
        for one in optimisers:
            one.step()
        losses.append(loss.detach())
        step += 1
        if time.monotonic() - reported > REPORT_S:
            model.eval()
            mean = torch.stack(losses).mean().item()
            print(f"{elapsed:5.0f} s, step {step}: loss {mean:.4f}, held out {validate()}", flush=True)
            losses, reported = [], time.monotonic()
            _keep(model, optimisers, plan, (elapsed, step))
    model.eval()
    print(f"{step} steps, held out {validate()}", flush=True)


def _resumed(model: torch.nn.Module, optimisers: tuple[torch.optim.Optimizer, ...], plan: Plan) -> tuple[float, int]:
    """Load the state of an interrupted training; (0.0, 0) if there is none."""
    if not plan.state.is_file():
        return 0.0, 0
    kept = torch.load(plan.state, map_location=plan.device, weights_only=True)
    model.load_state_dict(kept["model"])
    for one, state in zip(optimisers, kept["optimisers"], strict=True):
        one.load_state_dict(state)
    return kept["elapsed"], kept["step"]


def _keep(
    model: torch.nn.Module, optimisers: tuple[torch.optim.Optimizer, ...], plan: Plan, at: tuple[float, int]
) -> None:
    plan.state.parent.mkdir(parents=True, exist_ok=True)
    kept = {"model": model.state_dict(), "optimisers": [one.state_dict() for one in optimisers]}
    fresh = plan.state.with_suffix(".new")
    torch.save(kept | {"elapsed": at[0], "step": at[1]}, fresh)
    fresh.replace(plan.state)


def spread_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # [n, t, V], [n, t]
    """Mean cross-entropy of the labels that are not -100, in nats."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def distilled_loss(ours: torch.Tensor, theirs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # [n, t, V] x 2
    """Mean KL divergence from the teacher's distributions where there are labels, in nats."""
    seen = labels != -100
    return torch.nn.functional.kl_div(
        ours[seen].float().log_softmax(-1), theirs[seen].float().log_softmax(-1), log_target=True, reduction="batchmean"
    )


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Write a Hugging Face folder of float16 weights, and keep on with the values they were rounded to.

    Args:
        settings: of the tokenizer's configuration.
    """
    model.cpu().half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    model.float()


def error_rate(found: list[list[str]], expected: list[list[str]]) -> float:
    """Share of edits (Levenshtein's, over all texts) in what is expected: of characters or of words."""
    edits = sum(_edits(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    return edits / max(1, sum(map(len, expected)))


def _edits(ours: list[str], theirs: list[str]) -> int:
    row = list(range(len(theirs) + 1))
    for count, one in enumerate(ours, 1):
        last, row[0] = row[0], count
        for place, other in enumerate(theirs, 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (one != other))
    return row[-1]
