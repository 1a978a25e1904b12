"""A drafter conditioned on hidden states of the target, trained as it drafts: EAGLE-3 (arXiv 2503.01840).

Training-time test: the cell is run several steps deep over a whole text at once.  At step j row i holds its OWN hidden
state of step j - 1 beside the true token i + 1 + j, stands at position i + j, and predicts token i + 2 + j.  It attends
to the true entries of rows up to i, which are step 0's, and to its own entries of the steps in between: what a chain
sees.  Without it the first guess is better and the second one fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgespec.export.training.learners import Learner
from edgespec.export.training.options import HEAD_DECAY, Loss
from edgespec.export.training.target import Target

SPREAD = 0.6  # random matrices start with this over the root of their inputs


class Eagle(Learner):
    """One layer of the target's shape; the LM head starts as the target's.

    Args:
        tapped: after how many of the target's layers it looks at the residual stream.
        steps: how deep it is trained.
        inner: width of its MLP; None = the target's.
        seed: of the random weights.
    """

    def __init__(
        self,
        target: Target,
        loss: Loss,
        recompute: bool,
        tapped: tuple[int, ...],
        steps: int,
        inner: int | None,
        seed: int,
    ) -> None:
        super().__init__(target, loss, recompute)
        facts, generator = target.facts, torch.Generator().manual_seed(seed)
        self.tapped, self.steps = tapped, steps
        self.heads, self.kv_heads, self.head_dim = facts.heads, facts.kv_heads, facts.head_dim
        self.inner = inner or facts.intermediate
        hidden, query, key = facts.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.eps = target.source.arch.eps
        rotary = target.source.arch.rotaries.get("rope")
        self.theta = float(rotary.parameters["rope_theta"]) if rotary else 10000.0

        def matrix(rows: int, columns: int) -> nn.Parameter:
            drawn = torch.randn(rows, columns, generator=generator) * SPREAD * columns**-0.5
            return nn.Parameter(drawn.to(target.device))

        self.matrices = nn.ParameterDict(
            {
                "fc": matrix(hidden, len(tapped) * hidden),
                "q": matrix(query, 2 * hidden),
                "k": matrix(key, 2 * hidden),
                "v": matrix(key, 2 * hidden),
                "o": matrix(hidden, query),
                "gate": matrix(self.inner, hidden),
                "up": matrix(self.inner, hidden),
                "down": matrix(hidden, self.inner),
                "head": nn.Parameter(target.lm_head.detach().float().clone()),
            }
        )
        names = ("token", "hidden", "mlp", "last")
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(hidden, device=target.device)) for name in names})

    def states(self, tokens: Tensor) -> Tensor:
        """See Learner: embeddings, then the taps, then the last hidden states."""
        return self.target.tapped(tokens, (0, *self.tapped))

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        """See Learner: guesses weighted by ``HEAD_DECAY ** step``."""
        teacher = self.target.logits(states[-1]).softmax(-1) if self.loss == "kl" else None  # [B, T, V]
        total = states.new_zeros((), dtype=torch.float32)
        for step, rows in enumerate(self.rows(states)):  # [B, N, H]
            wanted, valid = self._wanted(tokens if teacher is None else teacher, lengths, rows.shape[1], step)
            if bool(valid.any()):
                total = total + HEAD_DECAY**step * self.one_loss(rows[valid], self._logits, wanted[valid])
        return total

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See Learner: a guess of a chain counts where those before it are right, which is what it is fed here."""
        for step, rows in enumerate(self.rows(self.states(tokens))):
            wanted, valid = self._wanted(tokens, lengths, rows.shape[1], step)
            yield self._logits(rows).float(), wanted, valid

    def rows(self, states: Tensor) -> Iterator[Tensor]:
        """For each step the rows [B, N, H] that the LM head multiplies: row i guesses token i + 2 + step."""
        embedded, taps = states[0].float(), torch.cat(list(states[1:-1]), -1).float()
        m, count = self.matrices, embedded.shape[1] - 1 - self.steps
        at = torch.arange(count, device=embedded.device)
        hidden_later = torch.full((count, count), -torch.inf, device=embedded.device).triu(1)
        g = F.linear(taps[:, :count], m["fc"])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.steps):
            token = embedded[:, 1 + step : 1 + step + count]
            x = torch.cat((self._norm(token, "token"), self._norm(g, "hidden")), -1)
            q = self._turned(self._split(F.linear(x, m["q"]), self.heads), at + step)
            k = self._turned(self._split(F.linear(x, m["k"]), self.kv_heads), at + step)
            shared = self.heads // self.kv_heads
            keys.append(k.repeat_interleave(shared, 1))
            values.append(self._split(F.linear(x, m["v"]), self.kv_heads).repeat_interleave(shared, 1))
            scores = [q @ keys[0].transpose(-1, -2) * self.head_dim**-0.5 + hidden_later]
            scores += [(q * own).sum(-1, keepdim=True) * self.head_dim**-0.5 for own in keys[1:]]
            p = torch.cat(scores, -1).softmax(-1)
            y = p[..., :count] @ values[0]
            for i, own in enumerate(values[1:]):
                y = y + p[..., count + i : count + i + 1] * own
            u = g + F.linear(y.transpose(1, 2).flatten(2), m["o"])
            b = self._norm(u, "mlp")
            g = u + F.linear(F.silu(F.linear(b, m["gate"])) * F.linear(b, m["up"]), m["down"])
            yield self._norm(g, "last")

    def tensors(self) -> dict[str, Tensor]:
        """See Learner: the names of published drafters."""
        m, n, layer = self.matrices, self.norms, "midlayer"
        attention = {f"{layer}.self_attn.{name}_proj.weight": m[name] for name in "qkvo"}
        mlp = {f"{layer}.mlp.{name}_proj.weight": m[name] for name in ("gate", "up", "down")}
        norms = {"input_layernorm": "token", "hidden_norm": "hidden", "post_attention_layernorm": "mlp"}
        around = {"fc.weight": m["fc"], "norm.weight": n["last"], "lm_head.weight": m["head"]}
        return attention | mlp | {f"{layer}.{theirs}.weight": n[ours] for theirs, ours in norms.items()} | around

    def described(self) -> dict[str, Any]:
        """Its configuration, as config.json of published drafters has it."""
        facts = self.target.facts
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": facts.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": facts.heads,
            "num_key_value_heads": facts.kv_heads,
            "head_dim": facts.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": facts.context,
            "vocab_size": facts.vocab,
            "draft_vocab_size": facts.vocab,
            "tie_word_embeddings": False,
            "dtype": "float16",
            "eagle_aux_hidden_state_layer_ids": list(self.tapped),
        }

    def _wanted(self, of: Tensor, lengths: Tensor, count: int, step: int) -> tuple[Tensor, Tensor]:
        """What each row should guess, [B, N, ..], and where that counts, [B, N]: tokens, or what the target expects."""
        ahead = step + (1 if of.dim() == 3 else 2)
        valid = torch.arange(count, device=of.device)[None] + ahead < lengths[:, None]
        return of[:, ahead : ahead + count], valid

    def _logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.matrices["head"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[name], self.eps)

    def _split(self, x: Tensor, heads: int) -> Tensor:  # [B, N, heads * dim] -> [B, heads, N, dim]
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:  # [B, heads, N, dim], [N]
        half = self.head_dim // 2
        angles = positions[:, None] * self.theta ** (-torch.arange(half, device=x.device) / half)  # [N, half]
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
