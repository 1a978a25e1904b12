"""The frozen model that heads and drafts are trained against, through transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from edgespec.errors import TrainingError
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.architectures.formula import FINAL_NORM
from edgespec.export.drafters.heads import model_fingerprint, tokenizer_fingerprint
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.tokenizers.facts import tokenizer_facts
from edgespec.export.tokenizers.files import open_codec
from edgespec.export.training.pairs import Reader
from edgespec.runtimes.text.codec import TextCodec

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Source:
    """A model's folder, read without torch."""

    path: Path  # its folder
    arch: Architecture  # its sizes and tensors
    codec: TextCodec  # its tokenizer
    eos: tuple[int, ...]  # ids that end a text
    fingerprints: dict[str, str]  # ``model`` and ``tokenizer``, as heads carry them
    reader: Reader | None = None  # of an encoder-decoder: how it reads sources

    @classmethod
    def open(cls, model: str, revision: str | None = None) -> Source:
        """Find and check a model: folder, hub id or ``builtin:NAME``.

        Raises:
            EdgespecError: not there, damaged, of an unknown architecture, or without a tokenizer.
        """
        path = resolve(model, revision)
        arch = architecture(Checkpoint.open(path), text_only=True)
        if arch.source.notes or arch.source.path != path:  # transformers would read it in another way, or not at all
            why = next(iter(arch.source.notes), "this is none")
            raise TrainingError(
                f"{path}: training needs a plain Hugging Face folder, but {why}",
                "train on the unquantized checkpoint, with its adapter merged by PEFT",
            )
        codec = open_codec(path)
        prints = {
            "model": model_fingerprint(arch.source, arch.final_norm.weight, arch.embedding),
            "tokenizer": tokenizer_fingerprint(codec),
        }
        reader = None if arch.encoder is None else Reader.open(path, arch, codec)
        eos = tuple(tokenizer_facts(arch.source.path, arch.config, arch.facts.vocab, codec).eos)
        return cls(path, arch, codec, eos, prints, reader)


class Target:
    """A frozen model: hidden states, early exits, logits.

    Args:
        sharded: each process holds a part of every layer (FSDP2), so all have to compute the same passes.
    """

    def __init__(self, source: Source, precision: str, device: Any, sharded: bool = False) -> None:
        self.source = source
        self.facts = source.arch.facts
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        capped = any(source.arch.rule(layer).cap for layer in range(self.facts.layers))
        attention = "eager" if capped else "sdpa"  # torch's own attention knows no caps
        kind = AutoModelForCausalLM if source.reader is None else AutoModelForSeq2SeqLM
        try:
            model = kind.from_pretrained(
                source.path, dtype=DTYPES[precision], attn_implementation=attention, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise TrainingError(f"{source.path}: transformers cannot load this model: {error}") from error
        model.eval().requires_grad_(False)
        self.stack = model.base_model if source.reader is None else model.get_decoder()
        self.sharded = sharded
        if sharded:  # embedding and LM head are used outside the layers and stay whole
            mesh = init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
            lists = (each for each in self.stack.modules() if isinstance(each, nn.ModuleList))
            for layer in next(each for each in lists if len(each) == self.facts.layers):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self.model = model.to(device)
        self.device = device
        name = source.arch.outer_names.get(FINAL_NORM, FINAL_NORM).rsplit(".", 1)[-1]
        if source.reader is None:
            self.norm = getattr(self.stack, name)
        # transformers 5.24 gave the argument another name
        known = inspect.signature(self.stack.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"
        self._memory: dict[str, Tensor] = {}

    @property
    def lm_head(self) -> Tensor:  # [vocab, hidden]
        """The LM head's weight, frozen."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def attend(self, sources: NDArray[np.int64] | None) -> None:
        """Let an encoder-decoder attend over sources [B, S], -1 after their ends, for the next tokens [B, T]."""
        if sources is None:
            return
        ids = torch.from_numpy(sources).to(self.device)
        seen = (ids >= 0).long()
        rows = self.model.get_encoder()(input_ids=ids.clamp(min=0), attention_mask=seen).last_hidden_state
        self._memory = {"encoder_hidden_states": rows, "encoder_attention_mask": seen}

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute hidden states after the final norm, [B, T, hidden], of tokens [B, T]."""
        return self.stack(input_ids=tokens, use_cache=False, **self._memory).last_hidden_state

    @torch.no_grad()
    def follow(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Read tokens [B, T] after those of a cache -> ``hidden`` [B, T, hidden] and the cache with them."""
        output = self.stack(input_ids=tokens, use_cache=True, **self._memory, **{self._cache: cache})
        return output.last_hidden_state, output.past_key_values

    def extend(self, tokens: Tensor, cache: Any, places: Tensor, seen: Tensor) -> Tensor:
        """Compute ``hidden`` [B, N, hidden], with gradients, of tokens [B, N] at ``places`` [B, N] after a cache.

        Args:
            tokens, places: of the rows.
            cache: of a text [B, T]; the rows are added to it.
            seen: which of the text and of the rows each row sees, bool [B, 1, N, T + N].
        """
        kind = next(self.stack.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=kind, device=seen.device).masked_fill(~seen, torch.finfo(kind).min)
        output = self.stack(
            input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=True, **{self._cache: cache}
        )
        return output.last_hidden_state

    @torch.no_grad()
    def exits(self, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Compute ``hidden``, and the final norm of the residual stream after each exit's layers, [B, T, hidden]."""
        output = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return output.last_hidden_state, [self.norm(output.hidden_states[at]) for at in layers]

    @torch.no_grad()
    def tapped(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the residual stream after each of ``layers`` (0: embeddings), then ``hidden``: [S, B, T, hidden]."""
        output = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return torch.stack([*(output.hidden_states[at] for at in layers), output.last_hidden_state])

    def scored(self, rows: Tensor) -> Tensor:
        """Apply the model's LM head to rows [..., hidden], scaled and capped as the model does: [..., vocab]."""
        head = self.model.get_output_embeddings()
        rule, logits = self.source.arch.logits, F.linear(rows.to(self.lm_head.dtype), self.lm_head, head.bias)
        if (bias := getattr(self.model, "final_logits_bias", None)) is not None:  # of BART and its kin
            logits = logits + bias
        logits = logits * rule.scale if rule.scale != 1 else logits
        return rule.cap * torch.tanh(logits / rule.cap) if rule.cap else logits

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits [..., vocab] of hidden states [..., hidden]."""
        return self.scored(hidden).float()
