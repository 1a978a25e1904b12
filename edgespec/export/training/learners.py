"""Torch modules that turn tokens into a loss: ``Learner``, and the heads on the last hidden state.

The arithmetic is that of ``runtimes.manifest.HeadGroup``; tensor names are those of ``export.drafters.heads``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edgespec.export.training.losses import guess_losses, round_weights
from edgespec.export.training.options import HEAD_DECAY, OF_TEXT, Loss, TrainOptions, choose_taps
from edgespec.export.training.target import Target

Logits = Callable[[Tensor], Tensor]  # hidden states [n, hidden] -> logits [n, vocab]


class Learner(nn.Module, ABC):  # type: ignore[misc]
    """A module to train for a frozen target.

    Only its own parameters are trained.  The target is not a submodule, so it is neither saved nor synchronized.
    """

    stride = 1  # tokens from one row of ``guesses`` to the next

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__()
        self._frozen = (target,)  # a tuple hides it from nn.Module
        self.loss: Loss = options.loss
        self.recompute = options.gradient_checkpointing
        self.width = target.facts.hidden  # of what is trained; the default rate depends on it

    @property
    def target(self) -> Target:
        """The frozen model."""
        return self._frozen[0]

    def states(self, tokens: Tensor) -> Tensor:
        """Return the target's states that the loss needs of tokens [B, T]: [S, B, T, hidden], the last layer's last."""
        return self.target.hidden(tokens)[None]

    @abstractmethod
    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        """Compute the loss, in nats, of tokens [B, T] of which ``lengths`` [B] are real, with their ``states``."""

    @abstractmethod
    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return for each head: logits [B, T', vocab], the right tokens [B, T'], and where they count [B, T'].

        Row t of a head belongs to position t of the tokens, or ``stride`` * t.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by the names of ``export.drafters.heads``."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the fields of ``HeadsFile`` that depend on the method."""

    def losses(self, rows: Tensor, logits: Logits, wanted: Tensor) -> Tensor:
        """Compute the loss of each row, [n].

        Args:
            rows: what ``logits`` turns into logits, [n, hidden].
            wanted: the target's distribution of the same tokens, [n, vocab], or the tokens themselves, int64 [n].
        """

        def compute(rows: Tensor) -> Tensor:
            return guess_losses(logits(rows).float(), wanted, self.loss)

        return checkpoint(compute, rows, use_reentrant=False) if self.recompute else compute(rows)

    @property
    def of_text(self) -> bool:
        """Whether the text is the training target, not the target's distribution."""
        return self.loss in OF_TEXT


class Chain(Learner):
    """A drafter that drafts token after token, trained ``steps`` deep over whole texts."""

    steps: int

    @abstractmethod
    def rows(self, states: Tensor) -> Iterator[Tensor]:
        """Return for each step the rows [B, N, hidden] that the LM head multiplies: row i drafts token i + 2 + step."""

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., vocab] of rows [..., hidden]; the LM head is the target's."""
        return self.target.scored(rows)

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        teacher = tokens if self.of_text else self.target.logits(states[-1]).softmax(-1)  # [B, T] or [B, T, V]
        losses, valid = [], []
        for step, rows in enumerate(self.rows(states)):  # [B, N, H]
            ahead, count = step + (2 if self.of_text else 1), rows.shape[1]
            valid.append(torch.arange(count, device=tokens.device)[None] + ahead < lengths[:, None])
            found = self.losses(rows[valid[-1]], self.logits, teacher[:, ahead : ahead + count][valid[-1]])
            losses.append(found.new_zeros(valid[-1].shape).masked_scatter(valid[-1], found))
        every, counts = torch.stack(losses, -1), torch.stack(valid, -1)  # [B, N, steps]
        fades = HEAD_DECAY ** torch.arange(self.steps, device=tokens.device)
        return (round_weights(every, counts, fades, self.loss) * every).sum()

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for step, rows in enumerate(self.rows(self.states(tokens))):
            count = rows.shape[1]
            valid = torch.arange(count, device=tokens.device)[None] + step + 2 < lengths[:, None]
            yield self.logits(rows).float(), tokens[:, step + 2 : step + 2 + count], valid


class HiddenStateLearner(Learner):
    """A drafter with layers of the target's sizes over the tapped states of its residual stream.

    Attributes:
        tapped: after how many of the target's layers.
    """

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        facts, rotary = target.facts, target.source.arch.rotaries.get("rope")
        self.tapped, self.eps = choose_taps(facts.layers), target.source.arch.eps
        self.heads, self.kv_heads, self.head_dim = facts.heads, facts.kv_heads, facts.head_dim
        self.theta = float(rotary.parameters["rope_theta"]) if rotary else 10000.0
        self.generator = torch.Generator().manual_seed(options.seed)

    def states(self, tokens: Tensor) -> Tensor:
        return self.target.tapped(tokens, (0, *self.tapped))

    def matrix(self, rows: int, columns: int, spread: float = 0.6) -> nn.Parameter:
        """Make a random matrix of numbers of ``spread`` over the root of its inputs."""
        drawn = torch.randn(rows, columns, generator=self.generator) * spread * columns**-0.5
        return nn.Parameter(drawn.to(self.target.device))

    def ones(self, size: int) -> nn.Parameter:
        """Make the weights of a norm."""
        return nn.Parameter(torch.ones(size, device=self.target.device))

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate heads [B, heads, N, dim] by rotary embeddings of positions [B, N] or [1, N]."""
        half = x.shape[-1] // 2
        angles = places[..., None] * self.theta ** (-torch.arange(half, device=x.device) / half)  # [B, N, half]
        cos, sin = angles.cos().repeat(1, 1, 2)[:, None], angles.sin().repeat(1, 1, 2)[:, None]
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def described(self) -> dict[str, Any]:
        """Return the sizes, as config.json of published drafters has them."""
        facts = self.target.facts
        return {
            "hidden_size": facts.hidden,
            "intermediate_size": facts.intermediate,
            "num_attention_heads": facts.heads,
            "num_key_value_heads": facts.kv_heads,
            "head_dim": facts.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": facts.context,
            "vocab_size": facts.vocab,
            "tie_word_embeddings": False,
            "dtype": "float16",
        }


class LastHidden(Learner):
    """Heads that draft tokens t + 2, t + 3, ... from the hidden state at t."""

    count: int

    @abstractmethod
    def rows(self, hidden: Tensor) -> list[Tensor]:
        """Return for each head the rows [..., hidden] that an LM head multiplies, of hidden states [..., hidden]."""

    def logits(self, head: int, rows: Tensor) -> Tensor:
        """Logits [..., vocab] of a head's rows; the LM head is the target's."""
        return self.target.scored(rows)

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        hidden = states[-1]  # [B, T, H]
        # position t + head + 1 has the target's own distribution of token t + head + 2
        teacher = tokens if self.of_text else self.target.logits(hidden).softmax(-1)  # [B, T] or [B, T, V]
        total = hidden.new_zeros((), dtype=torch.float32)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        for head, rows in enumerate(self.rows(hidden.float())):
            ahead = head + (2 if self.of_text else 1)
            valid = at[None, :-ahead] + ahead < lengths[:, None]  # [B, T - ahead]
            if not bool(valid.any()):
                continue
            chosen = rows[:, : rows.shape[1] - ahead][valid]  # [n, H]
            losses = self.losses(chosen, partial(self.logits, head), teacher[:, ahead:][valid])
            total = total + HEAD_DECAY**head * losses.mean()
        return total

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        for head, rows in enumerate(self.rows(self.target.hidden(tokens).float())):
            ahead = head + 2
            valid = at[None, :-ahead] + ahead < lengths[:, None]
            yield self.logits(head, rows[:, :-ahead]).float(), tokens[:, ahead:], valid


class Medusa(LastHidden):
    """y_i = h + silu(W_i h + b_i); W and b start at 0, so that training starts from next-token prediction.

    Medusa-1 of arXiv 2401.10774: the target stays unchanged.  Separate LM heads start as copies of the target's.
    """

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        hidden, device = target.facts.hidden, target.device
        self.count, self.own = count, own = options.heads, options.own_lm_heads
        self.weight = nn.Parameter(torch.zeros(count, hidden, hidden, device=device))
        self.bias = nn.Parameter(torch.zeros(count, hidden, device=device))
        copies = target.lm_head.detach().float()
        self.lm_heads = nn.ParameterList(nn.Parameter(copies.clone()) for _ in range(count if own else 0))

    def rows(self, hidden: Tensor) -> list[Tensor]:
        pairs = zip(self.weight, self.bias, strict=True)
        return [hidden + F.silu(F.linear(hidden, weight, bias)) for weight, bias in pairs]

    def logits(self, head: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.lm_heads[head]) if self.own else super().logits(head, rows)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"medusa.{i}.weight": self.weight[i] for i in range(self.count)}
        found |= {f"medusa.{i}.bias": self.bias[i] for i in range(self.count)}
        return found | {f"medusa.{i}.lm_head.weight": each for i, each in enumerate(self.lm_heads)}

    def described(self) -> dict[str, Any]:
        return {"kind": "medusa", "count": self.count, "own": self.own}


class Blockwise(LastHidden):
    """y_i = h + (W' silu(W h + b) + b')_i: one hidden layer for all heads, W' and b' start at 0 (arXiv 1811.03115).

    The paper trains one head a step for want of memory; here the losses are summed, which has less noise.
    """

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        hidden, device, count = target.facts.hidden, target.device, options.heads
        self.count, self.width = count, options.hidden_size or count * hidden
        inner = self.width
        first = torch.randn(inner, hidden, generator=torch.Generator().manual_seed(options.seed)) * hidden**-0.5
        self.inner = nn.Parameter(first.to(device))
        self.inner_bias = nn.Parameter(torch.zeros(inner, device=device))
        self.outer = nn.Parameter(torch.zeros(count * hidden, inner, device=device))
        self.outer_bias = nn.Parameter(torch.zeros(count * hidden, device=device))

    def rows(self, hidden: Tensor) -> list[Tensor]:
        inner = F.silu(F.linear(hidden, self.inner, self.inner_bias))
        outer = F.linear(inner, self.outer, self.outer_bias)
        return [hidden + part for part in outer.split(hidden.shape[-1], dim=-1)]

    def tensors(self) -> dict[str, Tensor]:
        return {
            "blockwise.inner.weight": self.inner,
            "blockwise.inner.bias": self.inner_bias,
            "blockwise.outer.weight": self.outer,
            "blockwise.outer.bias": self.outer_bias,
        }

    def described(self) -> dict[str, Any]:
        return {"kind": "blockwise", "count": self.count, "inner": self.width}


class EarlyExitHeads(Learner):
    """y = T h of the normed residual stream after some layers; T starts as the identity (arXiv 2506.03700)."""

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        self.name = options.method
        identity = torch.eye(target.facts.hidden, device=target.device)
        self.layers = options.exits
        self.weight = nn.Parameter(identity.repeat(len(self.layers), 1, 1))

    def states(self, tokens: Tensor) -> Tensor:
        final, exits = self.target.exits(tokens, self.layers)
        return torch.stack([*exits, final])

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        *exits, final = states
        valid = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
        teacher = self.target.logits(final[valid])  # [n, V]
        wanted = teacher.argmax(-1) if self.of_text else teacher.softmax(-1)
        total = final.new_zeros((), dtype=torch.float32)
        for weight, hidden in zip(self.weight, exits, strict=True):
            total = total + self.losses(F.linear(hidden[valid].float(), weight), self.target.scored, wanted).mean()
        return total

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        final, exits = self.target.exits(tokens, self.layers)
        wanted = self.target.logits(final).argmax(-1)
        # leave out the last position, as for other heads: the text does not contain its prediction
        valid = torch.arange(tokens.shape[1], device=tokens.device)[None] + 1 < lengths[:, None]
        for weight, hidden in zip(self.weight, exits, strict=True):
            yield self.target.scored(F.linear(hidden.float(), weight)).float(), wanted, valid

    def tensors(self) -> dict[str, Tensor]:
        return {f"exit.{at}.weight": self.weight[number] for number, at in enumerate(self.layers)}

    def described(self) -> dict[str, Any]:
        return {"kind": self.name, "count": len(self.layers), "exits": list(self.layers)}
