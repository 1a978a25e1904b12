"""Train drafters of blocks: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

The target's tapped states before a random token are the context.  The token and the masks after it are a block, whose
rows see the context and each other.  Many blocks of a text are computed at once.  The embedding and the LM head are
the target's and stay unchanged, so programs that take them from the target draft the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgespec.export.training.learners import HiddenStateLearner
from edgespec.export.training.losses import round_weights
from edgespec.export.training.options import TrainOptions
from edgespec.export.training.target import Target

BLOCK: dict[str, int] = {"dspark": 7, "dflash": 8}  # rows, the pending token's among them
FADE = 4.0  # position at which a draft token's weight has fallen to 1 / e of the first
RANK = 64  # at most, of a Markov head
SHARE = 1.5  # rows of blocks that a step computes, of the text's tokens


class Blocks(HiddenStateLearner):
    """A few layers over the target's hidden states that draft a block at once.

    With an ``anchor`` (DSpark) the pending token's row also drafts.  A Markov head of low rank then corrects each draft
    token by the previous token.  A confidence head learns the chance that it is accepted: the overlap of both
    distributions.
    """

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        facts, matrix, ones, layers = target.facts, self.matrix, self.ones, options.draft_layers
        self.layers, self.seed, self.anchor = layers, options.seed, options.method == "dspark"
        self.block, self.mask, anchor = BLOCK[options.method], mask_token(target), self.anchor
        self.rank = min(RANK, facts.hidden // 2) if anchor else 0
        hidden, query, key = facts.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"self_attn.q": (query, hidden), "self_attn.k": (key, hidden), "self_attn.v": (key, hidden),
                  "self_attn.o": (hidden, query), "mlp.gate": (facts.intermediate, hidden),
                  "mlp.up": (facts.intermediate, hidden), "mlp.down": (hidden, facts.intermediate)}  # fmt: skip
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden,
                 "self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}  # fmt: skip
        found: dict[str, nn.Parameter] = {"fc": matrix(hidden, len(self.tapped) * hidden)}
        for layer in range(layers):
            found |= {f"layers.{layer}.{name}_proj": matrix(*shape) for name, shape in shapes.items()}
            found |= {f"layers.{layer}.{name}": ones(size) for name, size in norms.items()}
        found |= {"hidden_norm": ones(hidden), "norm": ones(hidden)}
        if anchor:
            zeros = torch.zeros(facts.vocab, self.rank, device=target.device)
            found |= {"markov_head.markov_w1": matrix(facts.vocab, self.rank, 0.6 * self.rank**0.5),
                      "markov_head.markov_w2": nn.Parameter(zeros),
                      "confidence_head.proj": matrix(1, hidden + self.rank, 0.01)}  # fmt: skip
            self.sure_bias = nn.Parameter(torch.zeros(1, device=target.device))
        self.weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in found.items()})
        self.steps = self.block - (not anchor)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))
        inner = torch.tensor([[self.mask]], device=target.device)
        self.masked = (target.tapped(inner, (0,))[0, 0, 0].float(),)  # a tuple hides it from nn.Module

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        anchors = self._anchors(lengths)  # [B, N]
        rows = self.rows(states, anchors)  # [B, N, K, H]
        at = anchors[..., None] + torch.arange(self.steps, device=anchors.device)  # [B, N, K]: the token before a guess
        valid = at + 1 < lengths[:, None, None]
        at = at.clamp(max=tokens.shape[1] - 2)
        before = tokens.gather(1, at.flatten(1)).view_as(at)[valid]
        batch = torch.arange(len(tokens), device=at.device)[:, None, None].expand_as(at)[valid]
        place, chosen = at[valid], rows[valid]  # [n], [n, H]
        with torch.no_grad():
            wanted = self.target.logits(states[-1][batch, place]).softmax(-1)  # [n, V]
        labels = tokens[batch, place + 1] if self.of_text else wanted
        losses = self.losses(chosen, lambda rows: self.scored(rows, before), labels)
        fades = torch.exp(-torch.arange(self.steps, device=at.device) / FADE)
        every = losses.new_zeros(valid.shape).masked_scatter(valid, losses)
        weights = round_weights(every, valid, fades / fades.sum(), self.loss)[valid]
        loss = (weights * losses).sum()
        if not self.anchor:
            return loss
        with torch.no_grad():
            guessed = self.scored(chosen, before).float().softmax(-1)
            chance = torch.minimum(guessed, wanted).sum(-1)
        sure = F.linear(torch.cat((chosen, self._at("markov_head.markov_w1")[before]), -1),
                        self._at("confidence_head.proj"), self.sure_bias)[:, 0]  # fmt: skip
        return loss + (weights * F.binary_cross_entropy_with_logits(sure, chance, reduction="none")).sum()

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        count = tokens.shape[1] - self.steps
        anchors = torch.arange(count, device=tokens.device).expand(len(tokens), count)
        rows = self.rows(self.states(tokens), anchors)  # [B, N, K, H]
        for step in range(self.steps):
            before, wanted = tokens[:, step : step + count], tokens[:, step + 1 : step + 1 + count]
            yield self.scored(rows[:, :, step], before).float(), wanted, anchors + step + 1 < lengths[:, None]

    def scored(self, rows: Tensor, before: Tensor) -> Tensor:
        """Compute logits [..., vocab] of rows [..., hidden] of draft tokens after tokens ``before`` [...]."""
        head = self.target.lm_head
        logits = F.linear(rows.to(head.dtype), head).float()
        if not self.anchor:
            return logits
        return logits + F.linear(self._at("markov_head.markov_w1")[before], self._at("markov_head.markov_w2"))

    def rows(self, states: Tensor, anchors: Tensor) -> Tensor:
        """Compute the drafting rows, [B, N, K, hidden], of blocks that begin at tokens ``anchors`` [B, N]."""
        embedded, taps = states[0].float(), torch.cat(list(states[1:-1]), -1).float()
        count, size, device = anchors.shape[1], self.block, anchors.device
        context = self._norm(F.linear(taps, self._at("fc")), "hidden_norm")  # [B, T, H]
        first = embedded.gather(1, anchors[..., None].expand(-1, -1, embedded.shape[-1]))
        x = self.masked[0].expand(len(anchors), count, size, -1).clone()
        x[:, :, 0] = first
        places = (anchors[..., None] + torch.arange(size, device=device)).flatten(1)  # [B, N * S]
        x = x.flatten(1, 2)
        before = torch.arange(taps.shape[1], device=device)
        seen = before < places.view(-1, count, size)[:, :, :1].expand(-1, -1, size).flatten(1)[..., None]
        for layer in range(self.layers):
            x = self._layer(layer, x, context, places, before.expand(len(x), -1), seen)
        x = self._norm(x, "norm").unflatten(1, (count, size))
        return x if self.anchor else x[:, :, 1:]

    def _layer(self, layer: int, x: Tensor, context: Tensor, places: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """Run a layer over the rows of blocks [B, N * S, hidden]; ``seen`` [B, N * S, T]: of the context."""
        at = f"layers.{layer}."

        def split(y: Tensor, name: str, heads: int, where: Tensor | None) -> Tensor:  # -> [B, heads, rows, dim]
            y = F.linear(y, self._at(f"{at}self_attn.{name}_proj")).unflatten(-1, (heads, self.head_dim))
            if where is None:
                return y.transpose(1, 2)
            normed = self._norm(y, f"{at}self_attn.{name}_norm").transpose(1, 2)
            return self.turned(normed, where)

        h = self._norm(x, f"{at}input_layernorm")
        shared = self.heads // self.kv_heads

        def keys(y: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
            k, v = split(y, "k", self.kv_heads, where), split(y, "v", self.kv_heads, None)
            return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)

        q = split(h, "q", self.heads, places) * self.head_dim**-0.5
        (k, v), (own_k, own_v) = keys(context, before), keys(h, places)
        blocks = [each.unflatten(2, (-1, self.block)) for each in (q, own_k, own_v)]  # [B, heads, N, S, dim]
        scores = (q @ k.transpose(-1, -2)).masked_fill(~seen[:, None], -torch.inf)
        own = (blocks[0] @ blocks[1].transpose(-1, -2)).flatten(2, 3)  # [B, heads, N * S, S]
        p = torch.cat((scores, own), -1).softmax(-1)
        length = context.shape[1]
        y = p[..., :length] @ v
        y = y + (p[..., length:].unflatten(2, (-1, self.block)) @ blocks[2]).flatten(2, 3)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self._at(f"{at}self_attn.o_proj"))
        b = self._norm(x, f"{at}post_attention_layernorm")
        gate, up = F.linear(b, self._at(f"{at}mlp.gate_proj")), F.linear(b, self._at(f"{at}mlp.up_proj"))
        return x + F.linear(F.silu(gate) * up, self._at(f"{at}mlp.down_proj"))

    def tensors(self) -> dict[str, Tensor]:
        found = {f"{name.replace('/', '.')}.weight": value for name, value in self.weights.items()}
        return found | ({"confidence_head.proj.bias": self.sure_bias} if self.anchor else {})

    def described(self) -> dict[str, Any]:
        """Return its config.json as DeepSpec's DSpark and DFlash have it, which SGLang reads."""
        said: dict[str, Any] = {"mask_token_id": self.mask, "target_layer_ids": [at - 1 for at in self.tapped]}
        own: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": said}
        if self.anchor:
            own = {"architectures": ["Qwen3DSparkModel"], **said, "markov_rank": self.rank,
                   "markov_head_type": "vanilla", "enable_confidence_head": True,
                   "confidence_head_with_markov": True}  # fmt: skip
        more = {"model_type": "qwen3", "block_size": self.block, "num_hidden_layers": self.layers,
                "num_target_layers": self.target.facts.layers, "attention_bias": False,
                "layer_types": ["full_attention"] * self.layers}  # fmt: skip
        return own | super().described() | more

    def _anchors(self, lengths: Tensor) -> Tensor:
        """Choose random beginnings of blocks, [B, N]; different at every step, and the same after an interruption."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(self.drawn))
        self.drawn += 1
        count = max(1, int(SHARE * int(lengths.max()) / self.block))
        drawn = torch.rand(len(lengths), count, generator=generator).to(lengths.device)
        return (drawn * (lengths[:, None] - 1).clamp(min=1)).long()

    def _at(self, name: str) -> Tensor:
        found: Tensor = self.weights[name.replace(".", "/")]
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._at(name), self.eps)


def mask_token(target: Target) -> int:
    """Pick the mask token: one that is never followed by text."""
    vocab, config = target.facts.vocab, target.model.config
    known = [config.pad_token_id, *target.source.eos, vocab - 1]
    return next(int(each) for each in known if isinstance(each, int) and 0 <= each < vocab)
