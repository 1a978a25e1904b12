"""Train a LoRA adapter with which a model drafts for itself, over mask rows ("Uno": sglang#37667, vllm#55947).

::

    rows    x0 .. xp    mask  mask  mask     those of the text are the frozen model's
    teach               xp+2  xp+3  xp+4     what the model says of the next token after each

The model reads a text once without the adapter.  Then blocks of mask rows after many tokens are computed at once,
each of which sees the text up to its token and the mask rows before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import TrainingError
from edgespec.export.training.blocks import mask_token
from edgespec.export.training.learners import Learner
from edgespec.export.training.losses import round_weights
from edgespec.export.training.options import HEAD_DECAY, TrainOptions
from edgespec.export.training.target import Target
from edgespec.runtimes.files.draft_adapter import MOST_BLOCK, DraftAdapter
from edgespec.runtimes.files.lora import PREFIX
from edgespec.runtimes.slots.adapters import AS_STORED

ALPHA = 2.0  # factor of B A
SHARE = 1.0  # mask rows that a step computes, of the text's tokens
NOISE = "sglang"  # the layout whose mask rows are random tokens


class SelfDraft(Learner):
    """The low-rank adds of every matrix of the layers, which only mask rows read."""

    stride = 8

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        facts, self.steps, self.rank = target.facts, options.heads, options.rank
        if self.steps > MOST_BLOCK:
            raise TrainingError(f"--heads {self.steps}: expected at most {MOST_BLOCK} mask rows")
        config = target.model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if facts.architecture not in AS_STORED or kinds != {"full_attention"} or _window(config):
            raise TrainingError(
                f"{options.model}: {facts.architecture} with {', '.join(sorted(kinds))}: a self-draft is trained for "
                "models whose every layer attends to the whole text",
                "train a drafter: `edgespec train eagle`",
            )
        self.mask = None if options.layout == NOISE else mask_token(target)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))
        self.seed, self._on = options.seed, False
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()  # [rank, inputs] and [outputs, rank] by module
        for name, module in target.model.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in name:
                self._extend(name, module)

    def _extend(self, name: str, module: Any) -> None:
        """Add to what a matrix gives, while mask rows are computed."""
        key, device = name.replace(".", "/"), self.target.device
        outputs, inputs = module.out_features, module.in_features
        down = torch.randn(self.rank, inputs, generator=self.generator) * inputs**-0.5
        self.down[key] = nn.Parameter(down.to(device))
        self.up[key] = nn.Parameter(torch.zeros(outputs, self.rank, device=device))

        def add(_: Any, given: tuple[Tensor], found: Tensor) -> Tensor:
            if not self._on:
                return found
            x = given[0]
            return found + ALPHA * ((x @ self.down[key].to(x.dtype).T) @ self.up[key].to(x.dtype).T)

        module.register_forward_hook(add)

    def states(self, tokens: Tensor) -> Tensor:
        """Return nothing: the keys and values of the text are needed, and are not kept from step to step."""
        return torch.zeros(1, *tokens.shape, 0, device=tokens.device)

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        anchors = self._anchors(lengths)  # [B, N]
        hidden, rows = self._rows(tokens, anchors)  # [B, T, H], [B, N, K, H]
        at = anchors[..., None] + 1 + torch.arange(self.steps, device=anchors.device)  # [B, N, K]: the rows' places
        valid = at + self.of_text < lengths[:, None, None]
        at = at.clamp(max=tokens.shape[1] - 1 - self.of_text)
        batch = torch.arange(len(tokens), device=at.device)[:, None, None].expand_as(at)[valid]
        place = at[valid]
        if self.of_text:
            wanted = tokens[batch, place + 1]
        else:
            wanted = self.target.logits(hidden[batch, place]).softmax(-1)  # [n, V]
        losses = self.losses(rows[valid], self.target.scored, wanted)
        fades = HEAD_DECAY ** torch.arange(self.steps, device=at.device)
        every = losses.new_zeros(valid.shape).masked_scatter(valid, losses)
        return (round_weights(every, valid, fades / fades.sum(), self.loss)[valid] * losses).sum()

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        last = tokens.shape[1] - self.steps - 1
        anchors = torch.arange(0, last, self.stride, device=tokens.device).expand(len(tokens), -1)
        rows = self._rows(tokens, anchors)[1]
        for step in range(self.steps):
            at = anchors + 2 + step
            yield self.target.scored(rows[:, :, step]).float(), tokens.gather(1, at), at < lengths[:, None]

    def _rows(self, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the hidden states of a text [B, T, H], and of mask rows after tokens ``anchors`` [B, N, K, H]."""
        hidden, cache = self.target.follow(tokens)
        (batch, length), (count, size), device = tokens.shape, (anchors.shape[1], self.steps), tokens.device
        inside = torch.arange(count * size, device=device)
        places = (anchors[..., None] + 1 + torch.arange(size, device=device)).flatten(1)  # [B, N * K]
        if self.mask is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 - int(self.drawn))
            ids = torch.randint(self.target.facts.vocab, places.shape, generator=generator).to(device)
        else:
            ids = torch.full_like(places, self.mask)
        text = torch.arange(length, device=device) <= anchors.repeat_interleave(size, 1)[..., None]  # [B, N * K, T]
        own = (inside[:, None] // size == inside // size) & (inside <= inside[:, None])  # [N * K, N * K]
        seen = torch.cat((text, own.expand(batch, -1, -1)), -1)[:, None]
        self._on = True
        try:
            rows = self.target.extend(ids, cache, places, seen)
        finally:
            self._on = False
        return hidden, rows.unflatten(1, (count, size))

    def tensors(self) -> dict[str, Tensor]:
        names = {key: f"{PREFIX}{key.replace('/', '.')}" for key in self.down}
        found = {f"{name}.lora_A.weight": self.down[key] for key, name in names.items()}
        return found | {f"{name}.lora_B.weight": self.up[key] for key, name in names.items()}

    def described(self) -> dict[str, Any]:
        """Return adapter_config.json as PEFT has it."""
        modules = sorted({key.rsplit("/", 1)[-1] for key in self.down})
        return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "bias": "none",
                "r": self.rank, "lora_alpha": ALPHA * self.rank, "lora_dropout": 0.0, "fan_in_fan_out": False,
                "inference_mode": True, "target_modules": modules}  # fmt: skip

    def draft(self, source: str, report: dict[str, Any]) -> DraftAdapter:
        """Describe the adapter; ``source``: the model's fingerprint."""
        shares = report.get("joint", [])
        return DraftAdapter(
            block=self.steps, mask=self.mask, rank=self.rank, acceptance=shares, model=source,
            training=report["training"],
        )  # fmt: skip

    def _anchors(self, lengths: Tensor) -> Tensor:
        """Choose random tokens that blocks follow, [B, N]; different at every step, the same after an interruption."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(self.drawn))
        self.drawn += 1
        count = max(1, int(SHARE * int(lengths.max()) / self.steps))
        drawn = torch.rand(len(lengths), count, generator=generator).to(lengths.device)
        return (drawn * (lengths[:, None] - 2).clamp(min=1)).long()


def _window(config: Any) -> bool:
    """Whether layers attend to a window of the text, though they are not listed."""
    return not getattr(config, "layer_types", None) and bool(getattr(config, "sliding_window", None))
