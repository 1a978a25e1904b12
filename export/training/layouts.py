"""A trained EAGLE-3 drafter in the layouts of other programs.

SGLang's loader takes ``midlayer``, ``fc``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``, fills in zeros for what is
missing, and counts layers by their outputs.  Speculators numbers layers, nests the layer's configuration, and keeps a
copy of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import TrainingError
from edgespec.export.drafters.eagle3 import TAPS
from edgespec.export.training.options import Layout
from edgespec.export.training.target import Source

Tensors = dict[str, NDArray[Any]]
Config = dict[str, Any]
OUTER = (TAPS, "architectures", "dtype", "draft_vocab_size", "tie_word_embeddings")  # not of the layer


def _sglang(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    ids, vocab = config[TAPS], source.arch.facts.vocab
    if ids[0] < 1:
        raise TrainingError("--layout sglang: the drafter looks at embeddings, which SGLang does not count")
    counted = {"eagle_config": {TAPS: [at - 1 for at in ids], "use_aux_hidden_state": True}}
    every = {"d2t": np.zeros(vocab, np.int64), "t2d": np.ones(vocab, np.bool_)}
    return {**tensors, **every}, config | counted


def _speculators(tensors: Tensors, config: Config, source: Source, model: str) -> tuple[Tensors, Config]:
    arch = source.arch
    layers = {name.replace("midlayer.", "layers.0.", 1): value for name, value in tensors.items()}
    layers["embed_tokens.weight"] = np.ascontiguousarray(arch.source.read(arch.embedding), np.float16)
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    layer = {key: value for key, value in config.items() if key not in (*OUTER, "rope_theta")}
    said: Config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        TAPS: config[TAPS],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "dtype": "float16",
        "transformer_layer_config": {**layer, "rope_parameters": rope, "tie_word_embeddings": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": model, "architectures": list(source.arch.config.get("architectures") or [])},
        },
    }
    return layers, said


LAYOUTS: Mapping[Layout | None, Callable[[Tensors, Config, Source, str], tuple[Tensors, Config]]] = {
    "sglang": _sglang,
    "speculators": _speculators,
    None: lambda tensors, config, source, model: (tensors, config),
}
"""(tensors, configuration, the target, its name) -> both in that layout; None: edgespec's."""
