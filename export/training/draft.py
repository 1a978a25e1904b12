"""A small Llama distilled from the target: a draft model for speculative decoding (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.export.training.learners import Learner
from edgespec.export.training.options import DraftShape, Loss
from edgespec.export.training.target import Target

SPREAD = 0.05  # standard deviation of random weights: such small models learn faster than from the usual 0.02


class Draft(Learner):
    """A Llama with tied embeddings and the target's tokenizer.

    The embedding starts as the target's, reduced to its principal directions; a layer's matrices start as the
    target's where the shapes are equal, else at random.

    Args:
        shape: its sizes.
        ce_share: of the cross entropy of the text in a ``kl`` loss.
        seed: of the random weights.
    """

    def __init__(
        self, target: Target, loss: Loss, recompute: bool, shape: DraftShape, ce_share: float, seed: int
    ) -> None:
        super().__init__(target, loss, recompute)
        self.ce_share = 1.0 if loss == "ce" else ce_share
        torch.manual_seed(seed)
        self.width = shape.hidden
        model = LlamaForCausalLM(draft_config(target, shape))
        _start_from(model, target)
        self.model = model.to(target.device)
        if recompute:
            # transformers 5 is renaming it
            name = "activation_checkpointing_enable"
            getattr(self.model, name, self.model.gradient_checkpointing_enable)({"use_reentrant": False})
            self.model.train()  # no dropout here: it only switches the recomputation on

    def forward(self, tokens: Tensor, lengths: Tensor, states: Tensor) -> Tensor:
        """See Learner: (1 - ce_share) KL(target || draft) + ce_share CE, over every position."""
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        total = hidden.new_zeros((), dtype=torch.float32)
        if self.ce_share < 1:
            valid = at < lengths[:, None]
            wanted = self.target.logits(states[-1][valid]).softmax(-1)
            total = total + (1 - self.ce_share) * self.one_loss(hidden[valid], self.model.lm_head, wanted)
        if self.ce_share > 0:
            valid = at[:, :-1] + 1 < lengths[:, None]
            loss = self.one_loss(hidden[:, :-1][valid], self.model.lm_head, tokens[:, 1:][valid])
            total = total + self.ce_share * loss
        return total

    def guesses(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See Learner: one head, which guesses the next token of the text."""
        valid = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None] + 1 < lengths[:, None]
        yield self.logits(tokens)[:, :-1], tokens[:, 1:], valid

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 logits [B, T, vocab] of tokens [B, T]."""
        return self.model(input_ids=tokens, use_cache=False).logits.float()

    def tensors(self) -> dict[str, Tensor]:
        """See Learner: by Hugging Face names, without the LM head, which is the embedding."""
        return {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"}

    def described(self) -> dict[str, Any]:
        """Its configuration, as config.json has it."""
        config = self.model.config.to_dict()
        return {**config, "architectures": ["LlamaForCausalLM"], "dtype": "float16"}


def draft_config(target: Target, shape: DraftShape) -> LlamaConfig:
    """The configuration of a draft: the target's vocabulary, context and rotary embedding, its own sizes."""
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
        initializer_range=SPREAD,
    )


@torch.no_grad()
def _start_from(model: Any, target: Target) -> None:
    """Give a fresh model what it can use of the target."""
    arch, theirs = target.source.arch, target.source.arch.tensors  # by Llama's names, whatever the model is
    embedding = target.model.get_input_embeddings().weight.detach().float().cpu()
    for name, ours in model.named_parameters():
        if name == "model.embed_tokens.weight":
            ours.copy_(_reduced(embedding, ours.shape[1]))
        elif theirs.get(name) == tuple(ours.shape):
            ours.copy_(torch.from_numpy(arch.source.read(name)))


def _reduced(matrix: Tensor, width: int) -> Tensor:
    """A matrix [n, k] in its ``width`` principal directions, [n, width], its entries of standard deviation SPREAD."""
    if width == matrix.shape[1]:
        return matrix
    if width > matrix.shape[1]:
        return F.pad(matrix, (0, width - matrix.shape[1]))
    values, vectors = torch.linalg.eigh(matrix.double().T @ matrix.double())
    chosen = vectors[:, values.argsort(descending=True)[:width]]  # [k, width]
    signs = torch.where(chosen.sum(0) < 0, -1.0, 1.0)  # eigenvectors have no sign of their own
    found = (matrix.double() @ (chosen * signs)).float()
    return found * (SPREAD / found.std())
