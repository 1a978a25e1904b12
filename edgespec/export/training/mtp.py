"""A layer for multi-token prediction that learns (arXiv 2412.19437, 2.2; trained several steps deep as FastMTP, arXiv
2509.18362): the model's own, if its checkpoint has one, else a copy of its last layer with full attention.

At step j row i takes the layer's output at row i of step j - 1, at first the model's hidden state, and token i + 1 + j,
and predicts token i + 2 + j.  Embedding and LM head are the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import TrainingError
from edgespec.export.drafters.mtp import APART, LAYOUTS
from edgespec.export.source.source import Checkpoint
from edgespec.export.training.learners import Chain
from edgespec.export.training.options import TrainOptions
from edgespec.export.training.target import Target

SPREAD = 0.2  # the joining matrix begins as the hidden state plus random numbers of this scale


class Mtp(Chain):
    """The layer, and the matrix before it that joins a token and a hidden state."""

    def __init__(self, target: Target, options: TrainOptions) -> None:
        super().__init__(target, options)
        self.steps, hidden, base = options.heads, target.facts.hidden, target.model.base_model
        kinds = getattr(base.config, "layer_types", None) or ["full_attention"] * target.facts.layers
        full = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
        if not full or not hasattr(base, "rotary_emb") or not hasattr(base, "layers"):
            raise TrainingError(
                f"{target.source.path}: mtp copies a layer with full attention and rotary embeddings, and this model "
                "has none that is known",
                "train eagle or dspark",
            )
        self.layer = copy.deepcopy(base.layers[full[-1]]).float()
        if hasattr(self.layer.self_attn, "layer_idx"):
            self.layer.self_attn.layer_idx = 0
        drawn = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(options.seed))
        drawn = drawn * SPREAD * (2 * hidden) ** -0.5
        drawn[:, hidden:] += torch.eye(hidden)
        self.fc = nn.Parameter(drawn.to(target.device))
        self.norm = copy.deepcopy(target.norm).float()
        self.embedding_norm, self.hidden_norm = (_fresh(target.norm) for _ in range(2))
        self._begin()
        for each in self.parameters():
            each.requires_grad_(True)

    def states(self, tokens: Tensor) -> Tensor:
        return self.target.tapped(tokens, (0,))

    def rows(self, states: Tensor) -> Iterator[Tensor]:
        """See ``Chain``.

        A row sees the rows of step 0 up to its own place, and its own rows of the steps in between, as in a chain.
        """
        embedded, state = states[0].float(), states[-1].float()
        count, device = embedded.shape[1] - 1 - self.steps, state.device
        state, at = state[:, :count], torch.arange(count, device=device)
        places = torch.cat([at + step for step in range(self.steps)])[None]
        hidden = self._unseen(count).to(device)
        turns = self.target.model.base_model.rotary_emb(state, places)
        inputs: list[Tensor] = []
        for step in range(self.steps):
            token = self.embedding_norm(embedded[:, 1 + step : 1 + step + count])
            inputs.append(nn.functional.linear(torch.cat((token, self.hidden_norm(state)), -1), self.fc))
            end = (step + 1) * count
            found = self.layer(
                torch.cat(inputs, 1),
                attention_mask=hidden[None, None, :end, :end],
                position_ids=places[:, :end],
                position_embeddings=tuple(each[:, :end] for each in turns),
            )
            state = self.norm((found[0] if isinstance(found, tuple) else found)[:, -count:])
            yield state

    def _unseen(self, count: int) -> Tensor:
        """Return what is added to scores of rows [steps * N] of all steps, [steps * N, steps * N]: 0 or -inf."""
        at, steps = torch.arange(count), self.steps
        place, step = at.repeat(steps), torch.arange(steps).repeat_interleave(count)
        first = (step[None] == 0) & (place[None] <= place[:, None])
        own = (place[None] == place[:, None]) & (step[None] <= step[:, None])
        return torch.where(first | own, 0.0, -torch.inf)

    def tensors(self) -> dict[str, Tensor]:
        at = APART.at.format(0)
        around = {f"{at}{theirs}.weight": self._part(ours) for ours, theirs in APART.names.items()}
        return around | {f"{at}{name}": value for name, value in self.layer.state_dict().items()}

    def described(self) -> dict[str, Any]:
        """Return its configuration: the model's, for one layer."""
        said: dict[str, Any] = self.target.model.config.get_text_config().to_dict()
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "dtype": "float16",
               "tie_word_embeddings": False, "architectures": None}  # fmt: skip
        return {key: value for key, value in (said | one).items() if value is not None}

    def _part(self, ours: str) -> Tensor:
        found: Tensor = self.fc if ours == "fc" else getattr(self, ours.removeprefix("model.")).weight
        return found

    @torch.no_grad()
    def _begin(self) -> None:
        """Begin with the layer of the model's checkpoint, if it has one."""
        source, hidden = Checkpoint.open(self.target.source.path), self.target.facts.hidden
        layout = next((each for each in LAYOUTS if source.has(f"{each.at.format(0)}{each.names['fc']}.weight")), None)
        if layout is None:
            return

        def read(name: str) -> Tensor:
            return torch.from_numpy(source.read(name)).float()

        for ours, theirs in layout.names.items():
            value = read(f"{layout.at.format(0)}{theirs}.weight")
            if ours == "fc" and layout.hidden_first:
                value = torch.cat(value.split(hidden, 1)[::-1], 1)
            self._part(ours).copy_(value)
        inner = (layout.at + layout.layer).format(0)
        self.layer.load_state_dict({name: read(f"{inner}{name}") for name in self.layer.state_dict()})


@torch.no_grad()
def _fresh(norm: nn.Module) -> nn.Module:
    """Make a norm of the same kind that scales nothing: some kinds add 1 to their weights."""
    found = copy.deepcopy(norm).float()
    found.weight.fill_(1.0)
    x = torch.randn(4, found.weight.shape[0], device=found.weight.device)
    if float(found(x).square().mean()) > 2:
        found.weight.zero_()
    return found
