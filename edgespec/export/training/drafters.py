"""Train drafters: a small Llama distilled from the target (arXiv 2211.17192), and EAGLE-3 (arXiv 2503.01840).

EAGLE is trained in the way it drafts.  Training-time test runs the cell several steps deep over a whole text at once.
At step j, row i holds its OWN hidden state of step j - 1 and the true token i + 1 + j, has position i + j, and
predicts token i + 2 + j.  It attends to the true entries of rows up to i, which are step 0's, and to its own entries
of the steps in between, as in a chain.  Without it the first draft token is better and the second one fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.export.training.learners import Chain, HiddenStateLearner, Learner
from edgespec.export.training.options import DraftShape, TrainOptions, draft_shape
from edgespec.export.training.target import Target

# standard deviation of a draft's random weights: such small models learn faster than from the usual 0.02
DRAFT_SPREAD = 0.05


class Draft(Learner):
    """A Llama with tied embeddings and the target's tokenizer.

    The embedding starts as the target's, reduced to its principal directions; a layer's matrices start as the
    target's where the shapes are equal, else at random.
    """

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        self.ce_share = 1.0 if options.loss == "ce" else options.ce_share
        torch.manual_seed(options.seed)
        shape = draft_shape(options, target.facts)
        self.width = shape.hidden
        model = LlamaForCausalLM(draft_config(target, shape))
        _start_from(model, target)
        self.model = model.to(target.device)
        if self.recompute:
            # transformers 5 is renaming it
            name = "activation_checkpointing_enable"
            getattr(self.model, name, self.model.gradient_checkpointing_enable)({"use_reentrant": False})
            self.model.train()  # no dropout here: it only switches the recomputation on

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        total = hidden.new_zeros((), dtype=torch.float32)
        if self.ce_share < 1:
            valid = at < lengths[:, None]
            wanted = self.target.logits(states[-1][valid]).softmax(-1)
            total = total + (1 - self.ce_share) * self.losses(hidden[valid], self.model.lm_head, wanted).mean()
        if self.ce_share > 0:
            valid = at[:, :-1] + 1 < lengths[:, None]
            losses = self.losses(hidden[:, :-1][valid], self.model.lm_head, tokens[:, 1:][valid])
            total = total + self.ce_share * losses.mean()
        return total

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        valid = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None] + 1 < lengths[:, None]
        yield self.logits(tokens)[:, :-1], tokens[:, 1:], valid

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute float32 logits [B, T, vocab] of tokens [B, T]."""
        return self.model(input_ids=tokens, use_cache=False).logits.float()

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"}

    def described(self) -> dict[str, Any]:
        """Return its config.json."""
        config = self.model.config.to_dict()
        return {**config, "architectures": ["LlamaForCausalLM"], "dtype": "float16"}


def draft_config(target: Target, shape: DraftShape) -> LlamaConfig:
    """Return the configuration of a draft: the target's vocabulary, context and rotary embedding, its own sizes."""
    theirs, arch = target.model.config, target.source.arch
    theta = arch.rotaries["rope"].parameters["rope_theta"] if "rope" in arch.rotaries else 10000.0
    return LlamaConfig(
        vocab_size=target.facts.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=target.facts.context,
        rms_norm_eps=arch.eps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},  # scaling belongs to the target's frequencies
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        initializer_range=DRAFT_SPREAD,
    )


@torch.no_grad()
def _start_from(model: Any, target: Target) -> None:
    """Initialize a new model from the target's weights where possible."""
    arch, theirs = target.source.arch, target.source.arch.tensors  # by Llama's names, for every model
    embedding = target.model.get_input_embeddings().weight.detach().float().cpu()
    for name, ours in model.named_parameters():
        if name == "model.embed_tokens.weight":
            ours.copy_(_reduced(embedding, ours.shape[1]))
        elif theirs.get(name) == tuple(ours.shape):
            ours.copy_(torch.from_numpy(arch.source.read(name)))


def _reduced(matrix: Tensor, width: int) -> Tensor:
    """Project a matrix [n, k] on its principal directions, [n, width], with entries of DRAFT_SPREAD."""
    if width == matrix.shape[1]:
        return matrix
    if width > matrix.shape[1]:
        return F.pad(matrix, (0, width - matrix.shape[1]))
    values, vectors = torch.linalg.eigh(matrix.double().T @ matrix.double())
    chosen = vectors[:, values.argsort(descending=True)[:width]]  # [k, width]
    signs = torch.where(chosen.sum(0) < 0, -1.0, 1.0)  # eigenvectors have no unique sign
    found = (matrix.double() @ (chosen * signs)).float()
    return found * (DRAFT_SPREAD / found.std())


class Eagle(HiddenStateLearner, Chain):
    """One layer of the target's shape; the LM head starts as the target's."""

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        facts, matrix = target.facts, self.matrix
        self.steps, self.inner = options.heads, options.hidden_size or facts.intermediate
        hidden, query, key = facts.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.matrices = nn.ParameterDict(
            {
                "fc": matrix(hidden, len(self.tapped) * hidden),
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
        self.norms = nn.ParameterDict({name: self.ones(hidden) for name in names})

    def logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.matrices["head"])

    def rows(self, states: Tensor) -> Iterator[Tensor]:
        embedded, taps = states[0].float(), torch.cat(list(states[1:-1]), -1).float()
        m, count = self.matrices, embedded.shape[1] - 1 - self.steps
        at = torch.arange(count, device=embedded.device)[None]
        hidden_later = torch.full((count, count), -torch.inf, device=embedded.device).triu(1)
        g = F.linear(taps[:, :count], m["fc"])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.steps):
            token = embedded[:, 1 + step : 1 + step + count]
            x = torch.cat((self._norm(token, "token"), self._norm(g, "hidden")), -1)
            q = self.turned(self._split(F.linear(x, m["q"]), self.heads), at + step)
            k = self.turned(self._split(F.linear(x, m["k"]), self.kv_heads), at + step)
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
        m, n, layer = self.matrices, self.norms, "midlayer"
        attention = {f"{layer}.self_attn.{name}_proj.weight": m[name] for name in "qkvo"}
        mlp = {f"{layer}.mlp.{name}_proj.weight": m[name] for name in ("gate", "up", "down")}
        norms = {"input_layernorm": "token", "hidden_norm": "hidden", "post_attention_layernorm": "mlp"}
        around = {"fc.weight": m["fc"], "norm.weight": n["last"], "lm_head.weight": m["head"]}
        return attention | mlp | {f"{layer}.{theirs}.weight": n[ours] for theirs, ours in norms.items()} | around

    def described(self) -> dict[str, Any]:
        """Return its config.json as published drafters have it."""
        own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
               "intermediate_size": self.inner, "draft_vocab_size": self.target.facts.vocab,
               "eagle_aux_hidden_state_layer_ids": list(self.tapped)}  # fmt: skip
        return super().described() | own

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[name], self.eps)

    def _split(self, x: Tensor, heads: int) -> Tensor:  # [B, N, heads * dim] -> [B, heads, N, dim]
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
