"""EAGLE-3 drafters for tests: random checkpoints in the published layouts, and the arithmetic again in float64.

The reference keeps nothing: every round it makes all entries anew, of the tokens and what is tapped of the target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.decoding.drafter import Drafter as Drafting
from edgespec.decoding.loop import decode
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.request import DecodeOptions
from edgespec.decoding.stats import Stats
from edgespec.drafters.hidden_state import HiddenStateDrafter
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.write import write_drafter
from edgespec.export.heads.description import HeadPlan
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

Array = NDArray[np.float64]
HEADS, KEYS, DIM, INNER, EPS = 4, 2, 16, 96, 1e-5


def write_random(
    folder: Path, target: Architecture, config: dict[str, Any], tokens: Sequence[int] | None = None, layers: int = 1
) -> Path:
    """A checkpoint with random weights for a target.

    Args:
        folder: to make.
        target: the model that it is for.
        config: what config.json says beside sizes.
        tokens: what the rows of its LM head score; None = all tokens.
        layers: how many it has.
    """
    folder.mkdir(parents=True)
    random, hidden = np.random.default_rng(1), target.facts.hidden
    ids = list(range(target.facts.vocab)) if tokens is None else list(tokens)
    tapped = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, tapped * hidden), "norm.weight": (hidden,),
                                          "lm_head.weight": (len(ids), hidden)}  # fmt: skip
    for layer in range(layers):
        name, width = f"layers.{layer}" if layers > 1 else "midlayer", hidden if layer else 2 * hidden
        for part, rows, columns in (("self_attn.q", HEADS * DIM, width), ("self_attn.k", KEYS * DIM, width),
                                    ("self_attn.v", KEYS * DIM, width), ("self_attn.o", hidden, HEADS * DIM),
                                    ("mlp.gate", INNER, hidden), ("mlp.up", INNER, hidden),
                                    ("mlp.down", hidden, INNER)):  # fmt: skip
            shapes[f"{name}.{part}_proj.weight"] = rows, columns
        for norm in ("input_layernorm", "post_attention_layernorm", *(() if layer else ("hidden_norm",))):
            shapes[f"{name}.{norm}.weight"] = (hidden,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (tapped * hidden,)
    tensors: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape).astype(np.float32)
        tensors[name] = 1 + 0.3 * drawn if len(shape) == 1 else drawn * np.float32(1.5 * shape[1] ** -0.5)
    if tokens is not None:
        tensors["d2t"] = np.array(ids, np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(target.facts.vocab), ids)
    sizes = {"hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
             "num_hidden_layers": layers, "num_key_value_heads": KEYS, "rms_norm_eps": EPS, "rope_theta": 10000.0,
             "draft_vocab_size": len(ids), "vocab_size": target.facts.vocab}  # fmt: skip
    if config.get("speculators_model_type"):
        config = {**config, "transformer_layer_config": sizes}
        sizes = {}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **config}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**sizes, **config}), "utf-8")
    return folder


@dataclass
class Reference:
    """The arithmetic of a checkpoint; ``swapped``, ``late`` and ``as_ids`` are mistakes that others have made.

    Attributes:
        folder: the checkpoint.
        swapped: the hidden state before the embedding.
        late: entry i of token i, not i + 1.
        as_ids: d2t as tokens, not as offsets.
        flags: options of config.json, which may be other ones.
    """

    folder: Path
    swapped: bool = False
    late: bool = False
    as_ids: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text("utf-8"))
        self.flags = {**config, **config.get("transformer_layer_config", {}), **self.flags}
        self.tensors = {
            name.replace("midlayer", "layers.0"): value if value.dtype == np.int64 else value.astype(np.float64)
            for name, value in load_file(self.folder / "model.safetensors").items()
        }
        rows = len(self.tensors["lm_head.weight"])
        offsets = self.tensors.get("d2t", np.zeros(rows, np.int64))
        self.ids = offsets if self.as_ids else np.arange(rows) + offsets
        self.heads = self.flags["num_attention_heads"]
        self.keys = self.flags["num_key_value_heads"]
        self.dim = len(self.tensors["layers.0.self_attn.q_proj.weight"]) // self.heads

    def logits(self, embedded: Array, taps: Array, guesses: Array) -> Array:
        """[guesses + 1, rows]: of each guess and the one after, of embeddings [n, H], taps [n - 1, k * H] and
        embeddings of guesses [g, H]."""
        tensors, flags = self.tensors, self.flags
        if flags.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        own: Array = taps @ tensors["fc.weight"].T  # [n - 1, H]: what each row is made of
        tokens, positions = embedded[:-1] if self.late else embedded[1:], np.arange(len(taps))
        found = []
        for step in range(len(guesses) + 1):
            y = self._layers(np.asarray(tokens), own, positions)
            found.append(tensors["lm_head.weight"] @ self._norm(y[-1:], "norm")[0])
            if step < len(guesses):
                state = self._norm(y[-1:], "norm") if flags.get("norm_output") else y[-1:]
                own = np.concatenate((own, state))
                tokens = np.concatenate((tokens, guesses[step : step + 1]))
                positions = np.append(positions, positions[-1] + 1)
        return np.array(found)

    def _layers(self, tokens: Array, own: Array, positions: NDArray[np.int64]) -> Array:
        before, x = self.flags.get("norm_before_residual"), own
        for layer in range(self.flags["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer:
                given = self._norm(x, f"{name}.input_layernorm")
            else:
                hidden = self._norm(own, f"{name}.hidden_norm")
                halves = [self._norm(tokens, f"{name}.input_layernorm"), hidden]
                given, x = np.concatenate(halves[::-1] if self.swapped else halves, -1), hidden if before else own
            x = x + self._attention(given, name, positions)
            b = self._norm(x, f"{name}.post_attention_layernorm")
            gate = b @ self.tensors[f"{name}.mlp.gate_proj.weight"].T
            up = b @ self.tensors[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{name}.mlp.down_proj.weight"].T
        return x

    def _attention(self, given: Array, name: str, positions: NDArray[np.int64]) -> Array:
        n, dim = len(given), self.dim
        angles = positions[:, None] * self.flags["rope_theta"] ** (-np.arange(dim // 2) / (dim // 2))
        cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

        def project(part: str, heads: int, turned: bool) -> Array:
            x = (given @ self.tensors[f"{name}.self_attn.{part}_proj.weight"].T).reshape(n, heads, dim)
            half = np.concatenate((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
            return x * cos + half * sin if turned else x

        q, k, v = project("q", self.heads, True), project("k", self.keys, True), project("v", self.keys, False)
        out = np.zeros((n, self.heads, dim))
        for head in range(self.heads):
            kv = head * self.keys // self.heads
            scores = q[:, head] @ k[:, kv].T * dim**-0.5 + np.triu(np.full((n, n), -np.inf), 1)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, kv]
        y: Array = out.reshape(n, -1) @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
        return y

    def _norm(self, x: Array, name: str) -> Array:
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.flags["rms_norm_eps"])
        return y * self.tensors[f"{name}.weight"]


class Arithmetic(Protocol):
    """A drafter's arithmetic; ``ids``: what its LM head scores."""

    ids: NDArray[np.int64]

    def logits(self, embedded: Array, taps: Array, guesses: Array) -> Array:
        """See ``Reference``."""
        ...


class Recorder(HiddenStateDrafter):
    """Notes every proposal, and the tokens before it."""

    def __init__(self, target: Slot, slot: Slot, branch: tuple[int, ...] | None = None) -> None:
        super().__init__(target, slot, branch=branch)
        self.made: list[tuple[list[int], Proposal]] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        found = super().propose(tokens, budget)
        self.made.append((list(tokens), found))
        return found


class Pair:
    """A target and its drafter, written in float32 and opened; ``fresh`` is a slot of the target."""

    def __init__(self, folder: Path, arch: Architecture, drafter: Drafter, operators: Operators = "native") -> None:
        self.tapped, plan = drafter.tapped, HeadPlan(tapped=drafter.tapped)
        part = write_model(folder, arch, "fp32", gated=True, plan=plan, layout=operators).part
        own = write_drafter(folder, drafter, WeightChoice.of("fp32", None, None), operators)
        main, plain = ("native", "native") if operators == "native" else ("gated", "plain")
        self.model, self.drafter = Model(folder, part, main, 1), Model(folder, own, plain, 1)
        self.fresh = open_slot(self.model)

    def recorder(self, branch: tuple[int, ...] | None = None) -> Recorder:
        return Recorder(open_slot(self.model, reserve=1), open_slot(self.drafter, reserve=1), branch)


def written(
    made: Recorder, prompt: list[int], count: int, gamma: int = 4, around: Drafting | None = None, **more: Any
) -> tuple[list[int], Stats]:
    """Prompt and text of a request by a recorder, or by what is ``around`` it; no drafter was dropped."""
    stats, text = Stats(), list(prompt)
    options = DecodeOptions(max_new_tokens=count, gamma=gamma, **more)
    for done in decode(made.target, around or made, prompt, options, stats):
        text += done.tokens
    assert stats.dropped_reason is None
    return text, stats


def check_guesses(made: Recorder, reference: Arithmetic, fresh: Slot, tapped: Sequence[int], least: int) -> None:
    """Greedy guesses have the largest logits of the reference, or such as cannot be told from them.

    Args:
        made: what was proposed.
        reference: the arithmetic.
        fresh: a slot of the target; gives its residual stream.
        tapped: after how many layers.
        least: how many guesses there must be.
    """
    count, known = 0, [-1]
    taps = embedded = np.zeros((0, 0))
    columns = {int(token): at for at, token in enumerate(reference.ids)}
    for tokens, proposal in reversed(made.made):
        guesses = proposal.tokens.tolist()
        if not guesses:
            continue
        if known[: len(tokens)] != tokens:  # a request's rounds are beginnings of its last one
            ids, known = np.array(tokens, np.int64), tokens
            fresh.follow([])
            fresh.reserve(len(ids))
            taps = np.concatenate([fresh.forward_layers(ids, 0, 0, at) for at in tapped], -1).astype(np.float64)
            embedded = fresh.embed(ids).astype(np.float64)
        n = len(tokens)
        parents = list(range(-1, len(guesses) - 1)) if proposal.parents is None else proposal.parents.tolist()
        for parent in sorted(set(parents)):
            path, above = list[int](), parent
            while above >= 0:
                path.insert(0, guesses[above])
                above = parents[above]
            own = fresh.embed(np.array(path, np.int64)).astype(np.float64) if path else np.zeros((0, embedded.shape[1]))
            row = reference.logits(embedded[:n], taps[: n - 1], own)[-1]
            children = [guess for guess, its in zip(guesses, parents, strict=True) if its == parent]
            assert len(set(children)) == len(children)
            for guess in children:
                assert guess in columns, f"token {guess} cannot be guessed"
                better = int((row > row[columns[guess]] + 1e-2 * row.std()).sum())
                assert better < len(children), f"after {len(tokens)} tokens: {guesses}"
                count += 1
    assert count >= least
