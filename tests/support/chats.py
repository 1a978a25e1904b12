"""Conversations and templates in data/templates, and transformers' renderings of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "templates"
REFERENCE = json.loads((FOLDER / "reference.json").read_text("utf-8"))["templates"]
CONVERSATIONS = json.loads((FOLDER / "conversations.json").read_text("utf-8"))
TEMPLATES = sorted(file.stem for file in FOLDER.glob("*.jinja"))


def model_folder(place: Path, template: str) -> Path:
    """Make a model's folder with a template in ``place``."""
    folder = place / template
    folder.mkdir()
    shutil.copyfile(FOLDER / "tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(FOLDER / f"{template}.jinja", folder / "chat_template.jinja")
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    return folder


def one(template: str, chat: dict[str, Any]) -> dict[str, Any]:
    """Text and token ids of a conversation by transformers, or the template's words where it refuses it."""
    from jinja2 import TemplateError, UndefinedError
    from transformers import PreTrainedTokenizerFast

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
