"""Write a bundle atomically, and ``genai_config.json``, which lets onnxruntime-genai open it.

Fields of that file: https://github.com/microsoft/onnxruntime-genai/blob/main/src/config.h
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import STANDARD
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.tokenizers.chat_data import CHAT_FILE, chat_data
from edgespec.planning.budget import show_bytes
from edgespec.runtimes.files.checked import Checked, move_digests
from edgespec.runtimes.files.manifest import MANIFEST, FileEntry, Manifest, ModelPart, SamplingPart, TokenizerFacts
from edgespec.runtimes.files.seq2seq_format import SOURCE_TOKENIZER
from edgespec.runtimes.files.staged import staged, write_staged
from edgespec.runtimes.text.chat import TEMPLATE_FOLDER
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.special import SPECIAL_TOKENS_FILE

GENAI = "genai_config.json"
KIND = "decoder"  # any decoder, independent of its architecture


def genai_config(part: ModelPart, tokenizer: TokenizerFacts, sampling: SamplingPart | None) -> str | None:
    """Describe a target to onnxruntime-genai -> JSON; None = it has no standard graph.

    Args:
        tokenizer: whose tokens begin and end a text.  Without any that ends one, the last of the vocabulary does: there
            must be one.
        sampling: the model's own settings; None or no temperature = greedy.
    """
    if STANDARD not in part.graphs:
        return None
    facts, names = part.facts, ("key", "value")
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": part.graphs[STANDARD].file,
        "head_size": facts.head_dim,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "num_hidden_layers": facts.layers,
        "inputs": inputs | {f"past_{name}_names": f"past_key_values.%d.{name}" for name in names},
        "outputs": {"logits": "logits"} | {f"present_{name}_names": f"present.%d.{name}" for name in names},
    }
    ends = tokenizer.eos or [facts.vocab - 1]
    model = {
        "type": KIND,
        "vocab_size": facts.vocab,
        "context_length": facts.context,
        "bos_token_id": ends[0] if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
        "decoder": decoder,
    }
    search: dict[str, Any] = {"max_length": facts.context, "past_present_share_buffer": True, "do_sample": False}
    if sampling and sampling.temperature:
        search |= {"do_sample": True, "temperature": sampling.temperature, "top_k": min(sampling.top_k, facts.vocab),
                   "top_p": sampling.top_p, "repetition_penalty": sampling.repetition_penalty}  # fmt: skip
    return json.dumps({"model": model, "search": search}, indent=1)


@contextmanager
def staged_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary sibling of ``target`` that takes its name at the end; on any error, Ctrl-C too, nothing is left.

    Args:
        overwrite: replace an older bundle of that name; anything that is not a bundle is never replaced.

    Raises:
        ExportError: the target exists, or the disk cannot take the bundle.
    """
    refuse_existing(target, overwrite)
    begun = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target, folder=True) as folder:
            begun = True
            yield folder
        move_digests(folder, target)
    except OSError as error:
        what, hint = f"{target.parent}: cannot write here", "choose another folder with -o"
        if begun:
            what, hint = f"{target}: writing failed", "free some space, or choose another disk with -o"
        raise ExportError(f"{what}: {error.strerror}", hint) from error


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Check that ``target`` may be written."""
    if not target.exists():
        return
    if not (target / MANIFEST).is_file():
        if target.is_dir() and not any(target.iterdir()):
            return
        raise ExportError(f"{target}: exists and is not a bundle", "choose another folder with -o")
    if not overwrite:
        raise ExportError(
            f"{target}: a bundle is already there", "pass --overwrite to replace it, or choose another folder"
        )


def refuse_short_disk(target: Path, needed: int) -> None:
    """Check that the disk of ``target`` has room for ``needed`` bytes, before any is written."""
    there = next(folder for folder in (target, *target.resolve().parents) if folder.is_dir())
    disk = shutil.disk_usage(there)
    free = disk.free
    if disk.total and needed > free:  # without any room it is no disk, and writing says why it fails
        raise ExportError(
            f"{target}: its weights need {show_bytes(needed)} of disk, and {there} has {show_bytes(free)} free",
            "free some space, or choose another disk with -o",
        )


def copy_tokenizer(source: Path, folder: Path, codec: TextCodec, sources: TextCodec | None = None) -> None:
    """Copy what the runtime needs besides weights: tokenizers, chat templates, generation and model configuration.

    ``sources``: the tokenizer of what an encoder reads, if it is not that of the texts.
    """
    for name in (*TOKENIZER_FILES, SPECIAL_TOKENS_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for file in sorted((source / TEMPLATE_FOLDER).glob("*.jinja")):
        (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / TEMPLATE_FOLDER / file.name)
    if codec.converted:
        codec.tokenizer.save(str(folder / "tokenizer.json"))
    if sources is not None:
        sources.tokenizer.save(str(folder / SOURCE_TOKENIZER))
    if codec.templates:
        (folder / CHAT_FILE).write_text(json.dumps(chat_data(codec), ensure_ascii=False, indent=1), "utf-8")


def write_manifest(folder: Path, manifest: Manifest, checked: Checked | None = None) -> Manifest:
    """Write ``edgespec.json`` with size and SHA-256 of every other file; returns the manifest as written.

    ``checked``: what has begun to compute digests.
    """
    files, checked = {}, checked or Checked()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            files[name] = FileEntry(size=path.stat().st_size, sha256=checked.digest(path))
    checked.save()
    manifest = manifest.model_copy(update={"files": files})
    save_manifest(folder, manifest)
    return manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace ``edgespec.json`` in one step."""
    text = json.dumps(manifest.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False)
    write_staged(folder / MANIFEST, text + "\n")
