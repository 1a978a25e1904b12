"""Fields of a request that this server does not know: those that ask for nothing are left out, the others refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from edgespec.errors import InvalidRequest

NOTHING: tuple[Any, ...] = (False, "", [], {})  # values that ask for nothing, as null does
# fields of other APIs and servers that would change an answer, each with the values that do not
CHANGE: dict[str, tuple[Any, ...]] = {
    # OpenAI's and Anthropic's
    "audio": (), "container": (), "conversation": (), "function_call": ("none", "auto"), "functions": (),
    "mcp_servers": (), "modalities": (["text"],), "prompt": (), "web_search_options": (),
    # of how tokens are chosen
    "allowed_token_ids": (), "bad_words": (), "dry_multiplier": (0,), "dynatemp_range": (0,), "ignore_eos": (),
    "length_penalty": (1,), "logits_processors": (), "min_tokens": (0,), "mirostat": (0,), "no_repeat_ngram_size": (0,),
    "repeat_penalty": (1,), "stop_token_ids": (), "temperature_last": (), "tfs_z": (1,), "top_a": (0,),
    "top_logprobs": (0,), "top_n_sigma": (0, -1), "typical_p": (1,), "use_beam_search": (), "xtc_probability": (0,),
    # of what is written
    "format": (), "grammar": (), "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (),
    "json_schema": (), "skip_special_tokens": (True,), "structured_outputs": (),
    # of the prompt
    "add_generation_prompt": (True,), "add_special_tokens": (), "chat_template": (), "continue_final_message": (),
    "documents": (), "enable_thinking": (), "prompt_logprobs": (0,), "think": (), "truncate_prompt_tokens": (),
    # of the length
    "max_length": (), "max_new_tokens": (), "n_predict": (), "num_predict": (), "options": (),
}  # fmt: skip
_HINTS = {"functions": "give them as tools", "function_call": "give it as tool_choice"}
_HINTS |= dict.fromkeys(("guided_json", "json_schema", "format"), "give it as response_format")
_HINTS |= dict.fromkeys(("guided_regex", "guided_choice"), 'give an expression as {"edgespec": {"regex": ...}}')
_HINTS |= dict.fromkeys(("guided_grammar", "grammar"), 'give it as {"edgespec": {"lark": ...}}')
_HINTS |= dict.fromkeys(("enable_thinking", "think", "thinking"), "give it in chat_template_kwargs")
_HINTS["repeat_penalty"] = "give it as repetition_penalty"


def known_fields(
    sent: Mapping[str, Any], own: Sequence[str], ignored: Sequence[str], others: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Split a request -> the known fields, and the names of unknown ones.

    A field that is null counts as absent.  Fields that ask for nothing are ignored, and so are those of no known API.

    Args:
        sent: the request.
        own: fields of its API.
        ignored: fields that do not change an answer.
        others: fields of other APIs of this server.

    Raises:
        InvalidRequest: a field that would change the answer, or a misspelled field.
    """
    kept, unknown = {}, []
    for name, value in sent.items():
        if value is None or name in ignored:
            continue
        if name in own:
            kept[name] = value
            continue
        idle = CHANGE.get(name, ())
        idle += () if idle == (True,) else NOTHING
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in idle):
            if name in CHANGE or name in others:
                raise InvalidRequest(f"{name[:80]}: this API does not take it", _HINTS.get(name))
            if near := get_close_matches(name, own, 1, 0.85):
                raise InvalidRequest(f"{name[:80]}: no such field", f"did you mean {near[0]}?")
        unknown.append(name[:80])
    return kept, unknown
