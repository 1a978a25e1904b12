"""Write the decoder of a model's codes into a bundle, from its own checkpoint's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.codes import snac, vq
from edgespec.export.codes.graph import CodeGraph, CodeTensors
from edgespec.export.source.stored import read_object, safetensors_in
from edgespec.runtimes.files.codes import CodesPart
from edgespec.runtimes.files.manifest import TokenizerFacts
from edgespec.runtimes.text.codec import TextCodec

GRAPH, CODEBOOK, NOTHING, FOLDER = "codes.onnx", "codebook.bin", "nothing.bin", "codes"
Writer = Callable[[CodeGraph, Mapping[str, Any]], dict[str, Any]]
"""Adds a decoder to a graph, as a config.json describes it -> the fields of its ``CodesPart`` but for ``graph``."""
WRITERS: dict[str, Writer] = {"vq": vq.write, "patches": vq.write_patches, "snac": snac.write}


def read_codes(checkpoint: Path) -> tuple[Path, dict[str, Any], CodeTensors]:
    """Read the folder of a decoder of codes -> its config.json, its kind, and its tensors.

    Raises:
        ExportError: what is missing or odd in it.
    """
    file = checkpoint / "config.json"
    config = read_object(file, "give the folder of a decoder of codes, with its config.json")
    stored = safetensors_in(checkpoint)
    return file, config, CodeTensors(lambda name: stored[name].read(slice(None), None), stored)


def write_codes(
    file: Path, config: Mapping[str, Any], tensors: CodeTensors, bundle: Path, codec: TextCodec
) -> CodesPart:
    """Write the graph of a decoder of codes -> its part of the manifest.

    Args:
        file: where they come from, for messages.
        config: whose ``model_type`` is one of ``WRITERS``.
        tensors: of the decoder.
        bundle: the folder to write to.
        codec: of the model that writes the codes.

    Raises:
        ExportError: what is missing or odd in the checkpoint.
        UnsupportedModel: a decoder of another kind.
    """
    writer = WRITERS.get(kind := "snac" if snac.suits(config) else str(config.get("model_type")))
    if writer is None:
        raise UnsupportedModel(f"{file}: codes of the kind {kind!r}: expected one of {', '.join(WRITERS)}")
    graph = CodeGraph(tensors)
    fields = writer(graph, config)
    if sound := fields.get("sound"):
        words = snac.spoken(codec)
        fields["first"] = words.pop("first")
        sound |= words
    if (book := fields.pop("codebook", None)) is not None and isinstance(fields["image"], dict):
        (bundle / CODEBOOK).write_bytes(book.astype("<f4").tobytes())
        fields["image"] = fields["image"] | {"codebook": CODEBOOK}
    if (nothing := fields.pop("nothing", None)) is not None and isinstance(fields["image"], dict):
        (bundle / NOTHING).write_bytes(nothing.astype("<f4").tobytes())
        fields["image"] = fields["image"] | {"caption": {"max_tokens": len(nothing), "unconditional": NOTHING}}
    graph.save(bundle / GRAPH)
    try:
        return CodesPart(graph=GRAPH, **fields)
    except (ValidationError, TypeError) as error:
        raise ExportError(f"{file}: does not describe codes: {error}") from error


def ended(facts: TokenizerFacts, codes: CodesPart | None) -> TokenizerFacts:
    """Add the token that stops speech to those that end a text."""
    stops = {codes.sound.stop} - {*facts.eos} if codes and codes.sound else set()
    return facts.model_copy(update={"eos": [*facts.eos, *stops]})
