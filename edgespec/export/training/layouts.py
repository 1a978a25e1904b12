"""Write trained drafters and heads in the layouts of other programs, as their loaders read them.

SGLang's loader of EAGLE-3 reads ``midlayer``, ``fc``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``, and fills missing
ones with zeros.  Its loaders of DSpark and DFlash read layers, ``fc`` and norms, and use the model's LM head and
embedding.  They count layers by their outputs.  Speculators numbers layers, nests the layer's configuration, and keeps
copies of the model's embedding and LM head.  Medusa's authors number heads, and each has its LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.drafters.dflash import AUXILIARY
from edgespec.export.drafters.dspark import ANCHOR
from edgespec.export.drafters.eagle3 import TAPS
from edgespec.export.drafters.vocabulary import EMBEDDING, HEAD_WEIGHT
from edgespec.export.training.options import Layout, TrainOptions
from edgespec.export.training.target import Source

Tensors = dict[str, NDArray[Any]]
Config = dict[str, Any]
Writer = Callable[[Tensors, Config, Source, str], tuple[Tensors, Config]]
LAYER = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "layer_types", "rms_norm_eps",
         "max_position_embeddings", "vocab_size")  # fmt: skip
MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def laid_out(options: TrainOptions, tensors: Tensors, config: Config, source: Source) -> tuple[Tensors, Config]:
    """Return the trained tensors, float16 by our names, in the requested layout."""
    write = WRITERS.get((options.method, options.layout))
    return write(tensors, config, source, options.model) if write else (tensors, config)


def _sglang_eagle(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    ids, vocab = config[TAPS], source.arch.facts.vocab
    counted = {"eagle_config": {TAPS: [at - 1 for at in ids], "use_aux_hidden_state": True}}
    every = {"d2t": np.zeros(vocab, np.int64), "t2d": np.ones(vocab, np.bool_)}
    return {**tensors, **every}, config | counted


def _speculators_eagle(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    layers = {name.replace("midlayer.", "layers.0.", 1): value for name, value in tensors.items()}
    layers[EMBEDDING] = _half(source, source.arch.embedding)
    said: Config = {TAPS: config[TAPS], "norm_before_residual": False}
    return layers, _speculators("eagle3", "Eagle3DraftModel", said, config, source, model, 3)


def _speculators_blocks(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    anchor, block = "markov_rank" in config, config["block_size"]
    inner = config.get("dflash_config", config)
    said: Config = {AUXILIARY: [at + 1 for at in inner["target_layer_ids"]], "block_size": block, ANCHOR: anchor,
                    "mask_token_id": inner["mask_token_id"], "sliding_window_non_causal": False}  # fmt: skip
    said |= {key: config[key] for key in MARKOV if key in config}
    kind, name = ("dspark", "DSparkDraftModel") if anchor else ("dflash", "DFlashDraftModel")
    copies = {EMBEDDING: _half(source, source.arch.embedding), HEAD_WEIGHT: _half(source, source.arch.head.weight)}
    return {**tensors, **copies}, _speculators(kind, name, said, config, source, model, block - (not anchor))


def _speculators_mtp(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    said: Config = {"num_nextn_predict_layers": 1}
    found = _speculators("mtp", "MTPDraftModel", said, config, source, model, 3)
    del found["draft_vocab_size"]
    return tensors, found | {"transformer_layer_config": config}


def _medusa(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    names = {"weight": "0.linear.weight", "bias": "0.linear.bias", "lm_head.weight": "1.weight"}
    found: Tensors = {}
    for name, value in tensors.items():
        _, number, part = name.split(".", 2)
        found[f"{number}.{names[part]}"] = value
    for head in range(config["count"]):
        found.setdefault(f"{head}.1.weight", _half(source, source.arch.head.weight))
    facts = source.arch.facts
    return found, {"architectures": ["MedusaModel"], "medusa_num_heads": config["count"], "medusa_num_layers": 1,
                   "base_model_name_or_path": model, "hidden_size": facts.hidden,
                   "vocab_size": facts.vocab}  # fmt: skip


def _speculators(
    kind: str, architecture: str, said: Config, config: Config, source: Source, model: str, tokens: int
) -> Config:
    """Make a configuration of speculators: ``said`` about the drafter, and the layer's."""
    layer = {key: config[key] for key in LAYER if key in config}
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        **said,
        "draft_vocab_size": source.arch.facts.vocab,
        "tie_word_embeddings": False,
        "dtype": "float16",
        "transformer_layer_config": {**layer, "rope_parameters": rope, "tie_word_embeddings": False},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": model, "architectures": list(source.arch.config.get("architectures") or [])},
        },
    }


def _half(source: Source, name: str) -> NDArray[np.float16]:
    return np.ascontiguousarray(source.arch.source.read(name), np.float16)


WRITERS: Mapping[tuple[str, Layout | None], Writer] = {
    ("eagle", "sglang"): _sglang_eagle,
    ("eagle", "speculators"): _speculators_eagle,
    ("dspark", "speculators"): _speculators_blocks,
    ("dflash", "speculators"): _speculators_blocks,
    ("mtp", None): _speculators_mtp,
    ("mtp", "speculators"): _speculators_mtp,
    ("medusa", "medusa"): _medusa,
}
"""(method, layout; None: edgespec's) -> (tensors, configuration, the target, its name) -> both in it; others stay."""
