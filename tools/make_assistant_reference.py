"""Record transformers' results of one step of Gemma 4's assistant: tests/data/reference/gemma4_assistant.npz.

    python -m tools.make_assistant_reference

Needs torch and the same version of transformers as the other references.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from edgespec.export.bundle.model_part import open_model
from tests.support.assistant import STEP, AssistantReference, step_inputs, write_assistant, write_target


def main() -> None:
    """Write the file."""
    # 5.23.0 cannot make a model all of whose layers share
    Gemma4TextConfig.kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    with TemporaryDirectory() as folder:
        arch = open_model(write_target(Path(folder) / "target"), None)
        checkpoint = write_assistant(Path(folder) / "assistant", arch)
        text = json.loads((checkpoint / "config.json").read_text("utf-8"))["text_config"]
        tensors = AssistantReference(checkpoint, np.ones(arch.facts.hidden)).tensors
    config = Gemma4TextConfig(**{key: value for key, value in text.items() if key != "model_type"})
    model = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=config, backbone_hidden_size=arch.facts.hidden)
    ).eval()
    weights = {name: torch.tensor(value, dtype=torch.float32) for name, value in tensors.items()}
    loaded = model.load_state_dict(weights, strict=False)
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    assert not loaded.unexpected_keys
    token, state, kv = step_inputs(arch.facts.hidden)
    given = {kind: tuple(torch.tensor(each[None], dtype=torch.float32) for each in pair) for kind, pair in kv.items()}
    rows = kv["full_attention"][0].shape[1]
    with torch.no_grad():
        found = model(
            inputs_embeds=torch.tensor(np.concatenate((token, state))[None, None], dtype=torch.float32),
            position_ids=torch.tensor([[rows]]),
            shared_kv_states=given,
        )
    made = {"logits": found.logits[0, 0].numpy(), "state": found.last_hidden_state[0, 0].numpy()}
    np.savez(STEP, **made, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
