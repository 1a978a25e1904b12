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
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, UndefinedError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, __version__

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "templates"
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


def one(template: str, chat: dict[str, Any]) -> dict[str, Any]:
    """Text and token ids of a conversation, or why there are none."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    how = {
        "tools": chat.get("tools"),
        "add_generation_prompt": chat.get("generation_prompt", True),
        "continue_final_message": chat.get("continue_final", False),
        **chat["options"],
    }
    try:
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, **how)
    except Exception as error:  # a template may fail in any way
        own = isinstance(error, TemplateError) and not isinstance(error, UndefinedError)
        return {"error": str(error) if own else ""}
    ids = tokenizer.apply_chat_template(chat["messages"], tokenize=True, return_dict=False, **how)
    return {"text": text, "ids": [int(token) for token in ids]}


def train() -> Tokenizer:
    """A byte-level tokenizer of 600 tokens."""
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
