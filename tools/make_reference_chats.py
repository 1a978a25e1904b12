"""Write what transformers makes of the conversations and templates in tests/data/templates.

Needs transformers:

    python tools/make_reference_chats.py

The tests need it not: they compare with the file made here, reference.json: for every template and conversation the
text and its token ids, or ``error`` with the words of the template where it refuses the conversation (empty where the
words are those of Python).  The tokenizer, tokenizer.json, is a byte-level one trained on the templates by
``--tokenizer``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import __version__

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.chats import FOLDER, one

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<turn>", "</turn>", "[INST]", "[/INST]"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/data/templates/reference.json.")
    parser.add_argument("--tokenizer", action="store_true", help="train tokenizer.json anew, too")
    arguments = parser.parse_args()
    if arguments.tokenizer:
        train().save(str(FOLDER / "tokenizer.json"))
    conversations = json.loads((FOLDER / "conversations.json").read_text("utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.jinja")):
        template = file.read_text("utf-8")
        found[file.stem] = {name: one(template, chat) for name, chat in conversations.items()}
        refused = sum("error" in made for made in found[file.stem].values())
        print(f"{file.stem}: {len(conversations)} conversations, {refused} refused")
    lines = [f'"{name}": {json.dumps(made)}' for name, made in found.items()]  # a line a template
    written = f'{{"transformers": "{__version__}",\n"templates": {{\n' + ",\n".join(lines) + "\n}}\n"
    (FOLDER / "reference.json").write_text(written, "utf-8")


def train() -> Tokenizer:
    """Make a byte-level tokenizer of 600 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([file.read_text("utf-8") for file in sorted(FOLDER.glob("*.jinja"))], trainer)
    return tokenizer


if __name__ == "__main__":
    main()
