"""Compute the rotary frequencies that edgespec/export/architectures/rope.py is tested against, by transformers.

Needs torch and transformers:

    python tools/make_reference_ropes.py

Writes tests/data/reference/ropes.json: for each case the configuration, the context it is used at, the inverse
frequencies and the factor of cosines and sines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "data" / "reference" / "ropes.json"
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + 0.5 * i for i in range(16)]}

# what is scaled, the model's own limit, the context it is used at
CASES: list[tuple[dict[str, Any], int, int]] = [
    ({"rope_type": "linear", "factor": 4.0}, 2048, 2048),
    ({"rope_type": "dynamic", "factor": 2.0}, 2048, 1024),
    ({"rope_type": "dynamic", "factor": 2.0}, 2048, 4000),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, 4096),
    ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
      "beta_slow": 2.0, "attention_factor": 1.5}, 8192, 8192),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
      "mscale_all_dim": 0.8}, 163840, 4096),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "truncate": False}, 8192, 8192),
    ({"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONG}, 131072, 4096),
    ({"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONG}, 131072, 4097),
    ({"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 2.0, **LONG}, 131072, 131072),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, 131072, 131072),
]  # fmt: skip


def main() -> None:
    found = []
    for scaling, longest, context in CASES:
        parameters = {"rope_theta": 10000.0, **scaling}
        config = LlamaConfig(
            hidden_size=128, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=dict(parameters)
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, seq_len=context)
        found.append(
            {
                "config": {"max_position_embeddings": longest, "rope_parameters": parameters},
                "context": context,
                "inverse": [float(value) for value in inverse],
                "factor": float(factor),
            }
        )
    OUTPUT.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()
