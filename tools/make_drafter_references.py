"""Record the drafts of published drafters' own code, for the tests' checkpoints: tests/data/reference/drafters.

    python -m tools.make_drafter_references [NAME...]

Needs torch, transformers and these repositories' folders on PYTHONPATH, each at the commit that the archive names:
vllm-project/speculators (``src``), deepseek-ai/DeepSpec, SafeAILab/EAGLE, FasterDecoding/Medusa.  Each case builds a
small model of the reference, lets it save itself, fills it with seeded weights that the tests can recreate, and lets it
draft greedily in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config

from tests.support.published import (
    BLOCK,
    CHAIN,
    CUT,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    MASK,
    RANK,
    REFERENCES,
    VOCAB,
    contexts,
    tensors_of,
    write_target,
)  # fmt: skip

MARGIN = 1e-4  # the least gap between the best and the second logit
LAYER = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": None,
         "tie_word_embeddings": False}  # fmt: skip
Found = dict[str, Any]


def best(logits: torch.Tensor) -> int:
    """Take the likeliest column of logits [size], which no rounding changes."""
    first, second = logits.topk(2).values.tolist()
    assert first - second > MARGIN, "a tie: change SEED"
    return int(logits.argmax())


def filled(model: torch.nn.Module, target: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """Save a model, draw its weights again and load them -> names and shapes as it saved them."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        saved: dict[str, Any] = load_file(folder / "model.safetensors")
    else:
        saved = {name: value for name, value in model.state_dict().items() if "rotary_emb" not in name}
    shapes = {name: tuple(value.shape) for name, value in sorted(saved.items())}
    tensors = {name: torch.from_numpy(value) for name, value in tensors_of(shapes, target).items()}
    unexpected = model.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unexpected, unexpected
    model.float().eval()
    return shapes


# -- speculators -------------------------------------------------------------------------------------------------------


def _speculators(algorithm: str, **config: Any) -> Any:
    from speculators import SpeculatorModel
    from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = config.pop("layers", 2)
    sizes = LAYER | {key: config.pop(key) for key in ("rms_norm_eps", "rope_theta") if key in config}
    kind = LlamaConfig if config.pop("llama", False) else Qwen3Config
    inner = kind(**sizes, num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    # its eager masks let steps of training see those of other positions
    inner._attn_implementation = "sdpa" if algorithm == "eagle3" else "eager"
    used = SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=CHAIN)],
        default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]))  # fmt: skip
    made = SpeculatorModelConfig.registry[algorithm](transformer_layer_config=inner, speculators_config=used, **config)
    return SpeculatorModel.registry[algorithm](config=made)


def blocks(algorithm: str, anchor: bool) -> Callable[[Path, Path], tuple[Any, Found]]:
    """DFlash and DSpark of speculators: a training pass with one anchor, the pending token."""

    def make(folder: Path, target: Path) -> tuple[Any, Found]:
        more = {"markov_rank": RANK} if algorithm == "dspark" else {}
        model = _speculators(algorithm, draft_vocab_size=len(CUT), block_size=BLOCK, mask_token_id=MASK,
                             aux_hidden_state_layer_ids=[1, 3], sample_from_anchor=anchor, **more)  # fmt: skip
        shapes = filled(model, target, folder)
        guesses, sure = [], []
        for tokens, taps in contexts(2 * HIDDEN):
            n, pad = len(tokens), BLOCK + 1
            ids = torch.tensor([tokens + [0] * pad])
            states = torch.zeros(1, n + pad, 2 * HIDDEN)
            states[0, : n - 1] = torch.from_numpy(taps)
            mask = torch.zeros(1, n + pad)
            mask[0, n - 1] = 1
            with torch.no_grad():
                hidden, logits, *_ = model._backbone_forward(
                    states, ids, mask, torch.zeros(1, n + pad, HIDDEN), torch.zeros(1, n + pad, dtype=torch.long),
                    max_anchors=1)  # fmt: skip
                chain, chances = walk(model, hidden[0, not anchor :], logits[0, not anchor :], tokens[-1],
                                      lambda at: CUT[at])  # fmt: skip
            guesses.append(chain)
            sure.append(chances)
        found: Found = {"guesses": guesses}
        return shapes, found | ({"confidence": sure} if algorithm == "dspark" else {})

    return make


def dflash2(folder: Path, target: Path) -> tuple[Any, Found]:
    """DFlash 2 of speculators: a training pass with one anchor, then its selector's choices one after the other."""
    model = _speculators("dflash2", draft_vocab_size=VOCAB, block_size=BLOCK, mask_token_id=MASK, selector_rank=RANK,
                         aux_hidden_state_layer_ids=[1, 3], conv_group_size=8, selector_top_k=4)  # fmt: skip
    shapes = filled(model, target, folder)
    theirs = torch.from_numpy(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    for name in ("embed_tokens", "lm_head"):  # which it leaves to the target
        getattr(model, name).weight.data[:] = theirs
    guesses = []
    for tokens, taps in contexts(2 * HIDDEN):
        n, pad = len(tokens), BLOCK + 1
        states = torch.zeros(1, n + pad, 2 * HIDDEN)
        states[0, : n - 1] = torch.from_numpy(taps)
        mask = torch.zeros(1, n + pad)
        mask[0, n - 1] = 1
        with torch.no_grad():
            hidden, logits, *_ = model._backbone_forward(
                states, torch.tensor([tokens + [0] * pad]), mask, torch.zeros(1, n + pad, HIDDEN),
                torch.zeros(1, n + pad, dtype=torch.long), max_anchors=1)  # fmt: skip
            chain = list[int]()
            for at in range(1, BLOCK):
                before = torch.tensor((tokens[-1:] + chain)[-1:])
                ids, scores = model.candidate_selector.select(logits[0, at][None], hidden[0, at][None], before)
                chain.append(int(ids[0, best(scores[0])]))
        guesses.append(chain)
    return shapes, {"guesses": guesses}


def walk(
    model: Any, hidden: Any, logits: Any, pending: int, token: Callable[[int], int]
) -> tuple[list[int], list[float]]:
    """Guess along a block's rows, each corrected by the guess before it, as far as the model has such heads."""
    guesses, chances, before = list[int](), list[float](), torch.tensor([pending])
    markov, sure = getattr(model, "markov_head", None), getattr(model, "confidence_head", None)
    for at in range(len(logits)):
        row, given = logits[at], [hidden[at]]
        if markov is not None:
            row = row + markov.markov_w2(markov.markov_w1(before))[0]
            given.append(markov.markov_w1(before)[0])
        if sure is not None:
            chances.append(float(sure(torch.cat(given)).sigmoid()))
        guesses.append(token(best(row)))
        before = torch.tensor(guesses[-1:])
    return guesses, chances


# -- DeepSpec ----------------------------------------------------------------------------------------------------------


class Once(DynamicCache):  # type: ignore[misc]
    """A cache of one block: this version of transformers crops by another number."""

    def crop(self, *_: Any) -> None: ...


def deepspec(folder: Path, target: Path) -> tuple[Any, Found]:
    """DSpark by its authors' code for evaluation."""
    from deepspec.eval.dspark.draft_ops import build_dspark_proposal, forward_dspark_draft_block
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

    config = Qwen3Config(
        **LAYER, num_hidden_layers=2, layer_types=["full_attention"] * 2, architectures=["Qwen3DSparkModel"],
        num_target_layers=LAYERS, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 2], num_anchors=8,
        enable_confidence_head=True, confidence_head_with_markov=True, markov_rank=RANK, markov_head_type="vanilla",
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = Qwen3DSparkModel(config)
    shapes = filled(model, target, folder)
    guesses, sure, counts = [], [], []
    for tokens, taps in contexts(2 * HIDDEN):
        n = len(tokens)
        ids = torch.full((1, BLOCK), MASK)
        ids[0, 0] = tokens[-1]
        with torch.no_grad():
            hidden = forward_dspark_draft_block(
                model, draft_input_ids=ids, position_ids=torch.arange(n + BLOCK)[None],
                past_key_values_draft=Once(), target_hidden_states=torch.from_numpy(taps)[None], start=n - 1,
                block_size=BLOCK)  # fmt: skip
            made, cut = (
                build_dspark_proposal(model, draft_input_ids=ids, block_hidden=hidden, block_size=BLOCK,
                                      temperature=0.0, confidence_threshold=threshold)
                for threshold in (0.0, 0.5)
            )  # fmt: skip
            walk(model, hidden[0], model.compute_logits(hidden)[0], tokens[-1], int)  # for ties
        guesses.append(made.verify_input_ids[0, 1:].tolist())
        sure.append(made.confidence_logits[0].sigmoid().tolist())
        counts.append(cut.draft_token_count)
    return shapes, {"guesses": guesses, "confidence": sure, "counts": counts}


# -- chains of speculators ---------------------------------------------------------------------------------------------


def heard(model: Any, run: Callable[[], object]) -> list[torch.Tensor]:
    """Give what the LM head said while a pass ran."""
    found = list[torch.Tensor]()
    hook = model.lm_head.register_forward_hook(lambda _module, _given, logits: found.append(logits))
    with torch.no_grad():
        run()
    hook.remove()
    return found


def eagle3(folder: Path, target: Path, size: int = VOCAB, **config: Any) -> tuple[Any, Found]:
    """EAGLE-3 of speculators, of Llama's kind: training passes, of which a position sees its own earlier steps."""
    model = _speculators("eagle3", draft_vocab_size=size, eagle_aux_hidden_state_layer_ids=[1, 2, 3], layers=1,
                         **config or {"llama": True})  # fmt: skip
    shapes = filled(model, target, folder)
    guesses = []
    for tokens, taps in contexts(3 * HIDDEN):
        chain = list[int]()
        for _ in range(CHAIN):  # the code receives the draft tokens as if they were the text
            ids = torch.tensor([tokens[1:] + chain])
            states = torch.zeros(1, ids.shape[1], 3 * HIDDEN)
            states[0, : len(taps)] = torch.from_numpy(taps)
            logits = heard(model, partial(model, states, ids, torch.zeros_like(ids), ttt_steps=len(chain) + 1))
            found = best(logits[-1][0, len(taps) - 1])
            chain.append(found if size == VOCAB else CUT[found])
        guesses.append(chain)
    return shapes, {"guesses": guesses}


def peagle(folder: Path, target: Path) -> tuple[Any, Found]:
    """P-EAGLE of speculators: a training pass whose samples are the context, then one chain of masks."""
    from speculators.models.peagle import core

    model = _speculators("peagle", draft_vocab_size=len(CUT), eagle_aux_hidden_state_layer_ids=[1, 3], layers=2,
                         mask_token_id=MASK, norm_before_residual=True)  # fmt: skip
    shapes = filled(model, target, folder)
    guesses = []
    for tokens, taps in contexts(2 * HIDDEN):
        n = len(taps)
        anchors = torch.tensor([*range(n), *[n - 1] * (CHAIN - 1)])
        depths = torch.tensor([*[0] * n, *range(1, CHAIN)])
        core.generate_cod_sample_indices = lambda *_, found=(anchors, depths), **__: found
        ids = torch.tensor([tokens[1:] + [0] * CHAIN])
        states = torch.zeros(1, n + CHAIN, 2 * HIDDEN)
        states[0, :n] = torch.from_numpy(taps)
        last = torch.zeros(1, n + CHAIN, HIDDEN)
        run = partial(model, states, ids, torch.zeros_like(ids), verifier_last_hidden_states=last, loss_config={})
        seen = heard(model, run)
        guesses.append([CUT[best(row)] for row in seen[0][0, n - 1 :]])
    return shapes, {"guesses": guesses}


def mtp(folder: Path, target: Path) -> tuple[Any, Found]:
    """Guess by a layer for multi-token prediction of speculators, over the target's normed hidden states."""
    model = _speculators("mtp", layers=1, rms_norm_eps=1e-6, rope_theta=1e6)
    shapes = filled(model, target, folder)
    theirs = {name: torch.from_numpy(value) for name, value in load_file(target / "model.safetensors").items()}
    embedding = theirs["model.embed_tokens.weight"]
    layer, guesses = model.mtp_layers[0], []
    for tokens, taps in contexts(HIDDEN):
        chain, given, states = list[int](), list(tokens[1:]), torch.from_numpy(taps)[None]
        states = states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * theirs["model.norm.weight"]
        with torch.no_grad():
            for _ in range(CHAIN):
                n = len(given)
                places = torch.arange(n)[None]
                mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
                y = layer(hidden_states=states, token_embeddings=embedding[torch.tensor([given])], attention_mask=mask,
                          position_ids=places, position_embeddings=model.rotary_emb(states, places))  # fmt: skip
                chain.append(best((y @ embedding.T)[0, -1]))
                states, given = torch.cat((states, y[:, -1:]), 1), [*given, chain[-1]]
        guesses.append(chain)
    return shapes, {"guesses": guesses}


# -- SafeAILab/EAGLE ---------------------------------------------------------------------------------------------------


def eagle1(folder: Path, target: Path) -> tuple[Any, Found]:
    """EAGLE-1's layer, which EAGLE-2 loads as well, step by step over the target's normed hidden states."""
    from eagle.model.cnets1 import Model

    said = {**LAYER, "num_hidden_layers": 1, "max_position_embeddings": 128, "architectures": ["LlamaForCausalLM"],
            "model_type": "llama", "hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None}  # fmt: skip
    del said["head_dim"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said), "utf-8")
    config = SimpleNamespace(**said, pad_token_id=None)  # this version of transformers has other words for rotations
    model = Model(config, bias=True)
    shapes = filled(model, target, folder)
    theirs = {name: torch.from_numpy(value) for name, value in load_file(target / "model.safetensors").items()}
    guesses, logits = [], []
    for tokens, taps in contexts(HIDDEN):
        chain, given, states = list[int](), list(tokens[1:]), torch.from_numpy(taps)[None]
        states = states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * theirs["model.norm.weight"]
        past = None
        with torch.no_grad():
            for _ in range(CHAIN):
                y, past = model(states, input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
                states = y[:, -1:]
                row = (states @ theirs["model.embed_tokens.weight"].T)[0, -1]
                logits += [] if chain else [row.numpy()]
                given = [best(row)]
                chain += given
        guesses.append(chain)
    return shapes, {"guesses": guesses, "logits": logits}


# -- FasterDecoding/Medusa ---------------------------------------------------------------------------------------------


class Base(torch.nn.Module):  # type: ignore[misc]
    """In the place of their copies of Llama and Mistral, which this version of transformers cannot load."""

    def __init__(self, config: Any) -> None:
        super().__init__()


def medusa(own: bool, folder: Path, target: Path) -> tuple[Any, Found]:
    """Medusa-1's heads over the target: the first ones with separate LM heads, those of "version 2" without."""
    for kind in ("llama", "mistral"):
        theirs: Any = ModuleType(f"medusa.model.modeling_{kind}_kv")
        setattr(theirs, f"{kind.title()}ForCausalLM", Base)
        sys.modules[theirs.__name__] = theirs
    code: Any = import_module(f"medusa.model.medusa_model{'' if own else '_legacy'}")
    code.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: None)
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    said = code.MedusaConfig(medusa_num_heads=HEADS, medusa_num_layers=1, base_model_name_or_path="target")
    said.save_pretrained(folder)
    if own:
        sizes = SimpleNamespace(**said.to_dict() | base.config.to_dict() | {"_name_or_path": "target"})
        model = type("Model", (code.MedusaModelABC, Base), {})(sizes)
        model.model, run = base.model, partial(model, medusa_forward=True)
    else:
        run = model = code.MedusaModel(base, HEADS, 1, "target")
    shapes = filled(model.medusa_head, target, folder)
    with torch.no_grad():
        rows = [run(input_ids=torch.tensor([tokens]))[:, 0, -1] for tokens, _ in contexts(1)]  # [heads, vocab] each
    return shapes, {"guesses": [[best(each) for each in row] for row in rows]}


CASES: dict[str, Callable[[Path, Path], tuple[Any, Found]]] = {
    "dflash_speculators": blocks("dflash", False),
    "dflash_speculators_anchor": blocks("dflash", True),
    "dflash2_speculators": dflash2,
    "dspark_speculators": blocks("dspark", True),
    "dspark_speculators_no_anchor": blocks("dspark", False),
    "dspark_deepspec": deepspec,
    "eagle3_speculators": eagle3,
    "eagle31_speculators": partial(eagle3, size=len(CUT), fc_norm=True, norm_output=True),
    "peagle_speculators": peagle,
    "mtp_speculators": mtp,
    "eagle1": eagle1,
    "medusa1": partial(medusa, False),
    "medusa1_own": partial(medusa, True),
}


def main() -> None:
    """Write the archives."""
    parser = argparse.ArgumentParser(description="Guesses of published drafters' own code.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; none = all")
    torch.set_num_threads(1)
    REFERENCES.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or CASES:
        with TemporaryDirectory() as folder:
            target = write_target(Path(folder) / "target")
            shapes, found = CASES[name](Path(folder) / "drafter", target)
            config = json.loads((Path(folder) / "drafter" / "config.json").read_text("utf-8"))
        said = json.dumps({"config": config, "shapes": shapes})
        arrays: dict[str, Any] = {key: np.array(value) for key, value in found.items()}
        np.savez_compressed(REFERENCES / f"{name}.npz", said=said, **arrays)
        print(name, {key: np.array(value).shape for key, value in found.items()})


if __name__ == "__main__":
    main()
