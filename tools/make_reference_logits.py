"""Compute the reference logits that the exporter's parity with transformers is tested against.

Needs torch, transformers and what tests/support/hf.py needs (numpy, safetensors, ml_dtypes, tokenizers):

    python tools/make_reference_logits.py -o tests/data/reference
    python tools/make_reference_logits.py --forms       # only names, shapes and configurations, no logits

The tests need none of torch and transformers: they write the same seeded checkpoints (tests/support/hf.py) and
compare with the files made here, one archive per model type; for each entry of `hf.CONFIGS` it has the arrays
`saved` and `memory` (tests/support/saved.py) and

    tokens  int64   [n]         seeded random token ids, one sequence
    rows    int64   [r]         the positions of `tokens` whose logits are kept: all n, or some where n is large
    logits  float32 [r, vocab]  one forward pass over `tokens`: float32, eager attention, no cache
    greedy  int64   [24]        greedy continuation of the first 8 of `tokens`, not stopped by </s>

The run fails if transformers found a tensor missing or unexpected, if the logits are of no use as a reference (too
flat, too large, independent of earlier tokens) or if a greedy step is too close to a tie to be reproduced elsewhere.
Then change its seed in tests/support/zoo.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import hf, saved
from tests.support.zoo import CASES, CORE

REPOSITORY = Path(__file__).resolve().parent.parent
LENGTH, LONG_LENGTH = 40, 300
PROMPT_LENGTH, NEW_TOKENS = 8, 24
MIN_MARGIN = 0.05
"""The smallest gap between the best and the second-best logit allowed along the greedy continuation."""
MIN_DISTINCT = 8
"""A greedy continuation with fewer different tokens than this has fallen into a loop."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the reference logits of the tests' configurations.")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=REPOSITORY / "tests" / "data" / "reference",
        help="folder of the archives",
    )
    parser.add_argument("names", nargs="*", help="configurations; none = all")
    parser.add_argument("--forms", action="store_true", help="names, shapes and configurations alone, no logits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "version.txt").write_text(transformers.__version__ + "\n", "utf-8")
    names = arguments.names or list(hf.CONFIGS)
    for name in names:
        case = CASES[name]
        kept = {"saved": saved.text_array(saved.save(case.config, case.dtype))}
        if name not in CORE:  # which are computed
            kept["memory"] = saved.text_array(in_memory(case.config))
        keep(arguments.output, name, kept)
    for name in () if arguments.forms else names:
        with tempfile.TemporaryDirectory() as folder:
            model = load(hf.write_reference_checkpoint(folder, name))
        arrays, report = reference(name, model)
        keep(arguments.output, name, arrays)
        print(f"{name}: {report}")


def keep(folder: Path, name: str, arrays: dict[str, np.ndarray]) -> None:
    """Put arrays of a configuration into the archive of its model type, in place of those of the same names."""
    path = folder / saved.archive(name).name
    found: dict[str, np.ndarray] = {}
    if path.exists():
        with np.load(path) as old:
            found = {key: old[key] for key in old.files}
    found |= {f"{name}/{key}": value for key, value in arrays.items()}
    np.savez_compressed(path, allow_pickle=False, **found)
    saved.arrays_of.cache_clear()
    saved.kept.cache_clear()


def in_memory(config: dict[str, object]) -> dict[str, list[int]]:
    """List names and shapes of the tensors that transformers has in memory, tied ones once."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tied = set(model.all_tied_weights_keys)
    return {key: list(value.shape) for key, value in model.state_dict().items() if key not in tied}


def load(folder: Path) -> PreTrainedModel:
    """Give the model in float32 with eager attention, from a checkpoint that must fit it exactly."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: found for kind, found in info.items() if found}
    if problems:
        raise SystemExit(f"the checkpoint does not fit the model: {problems}")
    return model.eval()


def reference(name: str, model: PreTrainedModel) -> tuple[dict[str, np.ndarray], str]:
    """Compute the arrays of one configuration and a line about them."""
    config = hf.CONFIGS[name]
    is_long = name in hf.LONG
    length = LONG_LENGTH if is_long else LENGTH
    generator = np.random.Generator(np.random.PCG64([hf.SEEDS[name], length]))
    tokens = generator.integers(hf.EOS + 1, config["vocab_size"], size=length, dtype=np.int64)
    rows = np.arange(length, dtype=np.int64)
    if is_long:
        rows = rows[(rows < 8) | (rows % 9 == 0) | (rows >= length - 8)]
    logits = forward(model, tokens)
    check_logits(name, logits)
    greedy, margin = continue_greedily(model, tokens[:PROMPT_LENGTH])
    distinct = len(set(greedy.tolist()))
    if margin < MIN_MARGIN or distinct < MIN_DISTINCT or hf.EOS in greedy:
        raise SystemExit(f"{name}: change the seed: margin {margin:.4f}, {distinct} distinct, greedy {greedy.tolist()}")
    arrays = {"tokens": tokens, "rows": rows, "logits": logits[rows], "greedy": greedy}
    report = f"n {length}, std of the logits {logits.std():.2f}, smallest margin {margin:.4f}, {distinct} distinct"
    return arrays, report


@torch.inference_mode()
def forward(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Give the logits [n, vocab] of one sequence."""
    logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    return np.asarray(logits.numpy(), dtype=np.float32)


def check_logits(name: str, logits: np.ndarray) -> None:
    """Refuse logits that a wrong exporter could match by chance, or that overflow."""
    spread = float(logits.std())
    by_position = float(logits.std(axis=0).mean())
    if not (np.isfinite(logits).all() and 1.0 <= spread <= 3.0 and by_position >= 0.5):
        raise SystemExit(f"{name}: the logits have std {spread:.3f}, {by_position:.3f} across positions")


def continue_greedily(model: PreTrainedModel, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """`NEW_TOKENS` greedy tokens after the prompt and the smallest gap between a best and a second-best logit."""
    tokens, margin = prompt, np.inf
    for _ in range(NEW_TOKENS):
        last = forward(model, tokens)[-1]
        second, best = np.sort(last)[-2:]
        margin = min(margin, float(best - second))
        tokens = np.append(tokens, np.int64(last.argmax()))
    return tokens[len(prompt) :], margin


if __name__ == "__main__":
    main()
