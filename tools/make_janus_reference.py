"""Compute what transformers' Janus makes of a small model's weights, for the tests (tests/support/janus.py)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.support.janus import ARCHIVE, CONFIG, GENERATION, IDS
from tests.support.llamagen import weights


def main() -> None:
    torch.set_num_threads(1)
    model = transformers.JanusForConditionalGeneration(transformers.JanusConfig(**CONFIG)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = (Path(folder) / "config.json").read_bytes()
        with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    made = {name: torch.from_numpy(one) for name, one in weights(shapes).items()}
    assert not model.load_state_dict(made, strict=False).unexpected_keys
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        codes = model.generate(ids, attention_mask=mask, generation_mode="image", do_sample=False)
        picture = model.decode_image_tokens(codes)[0].numpy()
        drawn = model.prepare_embeddings_for_image_generation(codes[:, :-1])
        rows = torch.cat([model.get_input_embeddings()(ids), drawn], 1)
        hidden = model.model.language_model(inputs_embeds=rows).last_hidden_state
        logits = model.model.generation_head(hidden)[0].numpy()
    print(f"codes {codes[0].tolist()}, a picture of {picture.shape} from {picture.min():.2f} to {picture.max():.2f}")
    tensors = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    np.savez_compressed(ARCHIVE, config=np.frombuffer(config, np.uint8), tensors=tensors, logits=logits,
                        codes=codes[0].numpy(), picture=picture)  # fmt: skip


main()
