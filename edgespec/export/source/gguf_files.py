"""GGUF files of llama.cpp: the header, tensors dequantized a few rows at a time, the small files of a model folder.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The package gguf reads it as well,
but makes an array of every token and merge, of which there are hundreds of thousands.

The changes that llama.cpp's converter makes to tensors are undone (``gguf_kinds``): rows and columns are read in
another order, as they are stored, and values of small vectors are computed back.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel, install_hint
from edgespec.export.source.gguf_config import (
    check_tokenizer,
    describe_tokenizer,
    gguf_config,
    hf_name,
    kind_of,
    tokenizer_bytes,
    tokenizer_settings,
)
from edgespec.export.source.gguf_kinds import Facts, Floats, Ids, Kind, Metadata
from edgespec.export.source.keys import GGUF, unread
from edgespec.export.source.stored import LOSS, NONSENSE, TRUNCATED, FileRows, Opened, Stored, Temporary, span

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string, in bytes
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise


class Entry(NamedTuple):
    """Where a tensor is: number of its ggml type, shape with rows first, offset of its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int


def read_gguf_header(file: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Read the metadata of a file, in which arrays are lists, and where its tensors are, by name."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(file, content).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ExportError(f"{file}: not a readable GGUF file: {error}", TRUNCATED) from error


class _Reader:
    """Reads values one after another."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self.content, self.at = file, content, 0

    def header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
            what = "the other byte order" if swapped else f"version {version}"
            raise UnsupportedModel(f"{self.file}: a GGUF file of {what} is not supported", "convert the model again")
        tensors, values = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(values):
            key = self.string()
            metadata[key] = self.value(self.number("I"))
        found = [self.entry() for _ in range(tensors)]
        aligned = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(aligned, int) or aligned <= 0:
            raise ValueError(f"general.alignment is {aligned!r}")
        start = -(-self.at // aligned) * aligned
        entries = {name: entry._replace(offset=start + entry.offset) for name, entry in found}
        if len(entries) != len(found):
            raise ValueError("two tensors have the same name")
        return metadata, entries

    def entry(self) -> tuple[str, Entry]:
        name = self.string()
        lengths = [self.number("Q") for _ in range(self.number("I"))]
        return name, Entry(self.number("I"), tuple(reversed(lengths)), self.number("Q"))

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        length = self.number("Q")
        if length > len(self.content) - self.at:
            raise ValueError(f"a string of {length} bytes goes beyond its end")
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """Read consecutive strings: a vocabulary has hundreds of thousands, so the loop calls no Python functions."""
        content, end, at, found, length_at = self.content, len(self.content), self.at, [], _LENGTH.unpack_from
        for _ in range(count):
            (length,) = length_at(content, at)
            at += 8 + length
            if at > end:
                raise ValueError(f"a string of {length} bytes goes beyond its end")
            found.append(content[at - length : at].decode("utf-8"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        its, count = self.number("I"), self.number("Q")
        if its in NUMBERS:
            dtype = np.dtype(NUMBERS[its]).newbyteorder("<")
            if count > (len(self.content) - self.at) // dtype.itemsize:
                raise ValueError(f"an array of {count} values goes beyond its end")
            values = np.frombuffer(self.content[self.at : self.at + count * dtype.itemsize], dtype).tolist()
            self.at += count * dtype.itemsize
            return values
        if its == STRING:
            return self.strings(count)
        raise ValueError(f"an array of type {its}")


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BESIDE = ("generation_config.json", "calibration.txt")
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # of a text, a turn, a message, a file of code
ENDING = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
          "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
          "<\uff5cend\u2581of\u2581sentence\uff5c>")  # fmt: skip
"""Control tokens that end a text by their names, as in llama.cpp (llama-vocab.cpp)."""
HARMONY = ("<|return|>", "<|call|>")
POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
PROJECTOR = "mmproj"
EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")


def write_small_files(
    folder: Path, file: Path, metadata: Metadata, config: dict[str, Any], tokenizer: bool = True
) -> list[str]:
    """Write what a model folder holds besides weights; returns notes.

    A tokenizer.json next to the GGUF file replaces the tokenizer inside it.

    Args:
        tokenizer: whether the file's own tokenizer is written too; else it is only checked whether it can be.
    """
    notes = []
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", _generation(metadata))
    pooling = metadata.get(f"{metadata['general.architecture']}.pooling_type")
    if pooling in POOLINGS:
        (folder / "1_Pooling").mkdir()
        _write(folder / "1_Pooling" / "config.json", {f"pooling_mode_{POOLINGS[pooling]}": True})
    taken: tuple[str, ...] = BESIDE
    if (file.parent / TOKENIZER[0]).is_file():
        notes.append(f"the tokenizer is {TOKENIZER[0]} beside the file, not the file's own")
        taken = (*TOKENIZER, *BESIDE)
    else:
        if tokenizer:
            # without line breaks: json's encoder in C makes none, and the one in Python takes seconds for a vocabulary
            _write(folder / TOKENIZER[0], describe_tokenizer(file, metadata), indent=None)
        else:
            check_tokenizer(file, metadata)
        _write(folder / TOKENIZER[1], tokenizer_settings(metadata))
    for name in taken:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
    return notes


def _generation(metadata: Metadata) -> dict[str, Any]:
    """Return the equivalent of generation_config.json: ends of texts, suppressed tokens, sampling settings."""
    ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS} - {None}
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    control = {token: at for at, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3}
    ending = HARMONY if set(HARMONY) <= control.keys() else ENDING  # there <|end|> is the end of a channel
    ends |= {at for token, at in control.items() if token in ending}
    found: dict[str, Any] = (
        {"eos_token_id": sorted(int(number) for number in ends if number is not None)} if ends else {}
    )
    if suppressed := metadata.get("tokenizer.ggml.suppress_tokens"):
        found["suppress_tokens"] = suppressed
    if (temperature := metadata.get("general.sampling.temp")) is not None:
        asked = {name: metadata.get(f"general.sampling.{theirs}") for name, theirs in SAMPLING.items()}
        found |= {"do_sample": temperature > 0}
        found |= {name: value for name, value in asked.items() if value is not None} if temperature > 0 else {}
    return found


def _write(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", "utf-8")


OWN_CHECKPOINT = "for pictures and sound export from the Hugging Face checkpoint"
PLAIN = {"F32", "F16", "BF16"}
INSTALL = install_hint("gguf")


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor of a GGUF file, or some of its rows."""

    file: Path  # the file. name: of the tensor in it
    name: str
    kind: int  # number of its ggml type
    shape: tuple[int, ...]  # of the tensor, [k] or [n, k]
    offset: int  # of its first byte in the file
    block: tuple[int, int]  # values of a block, and its bytes
    rows: Ids | None = None  # where each row (of a vector: each number) is in the file; None = in order
    columns: Ids | None = None  # where each column is
    undo: Callable[[Floats], Floats] | None = None  # computes back what values were
    stored_rows: int = 0  # rows in the file; 0 = as many

    def read(self, rows: slice, columns: slice | None) -> Floats:
        if len(self.shape) == 1:
            every = self._values(slice(0, 1), 0, self._length)[0]
            values = every if self.rows is None else every[self.rows]
            return (values if self.undo is None else self.undo(values))[rows]
        top, bottom = span(rows, self.shape[0])
        left, right = span(columns, self.shape[1])
        places = slice(top, bottom) if self.rows is None else self.rows[top:bottom]
        if self.columns is not None:
            found = self._values(places, 0, self.shape[1])[:, self.columns[left:right]]
        else:
            found = self._values(places, left, right)
        return found if self.undo is None else self.undo(found)

    def blocks(self) -> FileRows | None:
        """Return its rows as they are stored, in the order of the model; None of a vector."""
        from gguf import GGMLQuantizationType

        if len(self.shape) != 2 or self.undo is not None:
            return None
        order = None if self.columns is None else np.argsort(self.columns)
        return FileRows(GGMLQuantizationType(self.kind).name, self._blocks, order)

    def taken(self, rows: Ids) -> GgufTensor:
        """Return it with other rows, or those in another order: int64 [n], where they are in this one."""
        places = rows if self.rows is None else self.rows[rows]
        return replace(self, rows=places, shape=(len(rows), *self.shape[1:]),
                       stored_rows=self._length)  # fmt: skip

    def _blocks(self, rows: slice | Ids) -> NDArray[np.uint8]:  # [rows, bytes]
        return self._mapped()[rows if self.rows is None else self.rows[rows]]

    def _mapped(self) -> NDArray[np.uint8]:  # [n, bytes]
        """Map its rows; pages are read when they are used.

        Raises:
            ExportError: the file is not there, or ends before the tensor does.
        """
        size, length = self.block
        n, k = (self._length, self.shape[1]) if len(self.shape) == 2 else (1, self._length)
        try:
            mapped = np.memmap(self.file, np.uint8, "r", self.offset, (n, k // size * length))
        except (OSError, ValueError) as error:
            raise ExportError(f"{self.file}: cannot read {self.name}: {error}", TRUNCATED) from error
        return mapped.view(np.ndarray)

    @property
    def _length(self) -> int:
        """Return the rows in the file; of a vector its numbers."""
        return self.stored_rows or self.shape[0]

    def _values(self, rows: slice | Ids, left: int, right: int) -> Floats:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        size, length = self.block
        first, last = left // size, -(-right // size)
        blocks = self._mapped()[rows, first * length : last * length].copy()
        if blocks.size == 0:
            return np.zeros((len(blocks), right - left), np.float32)
        values = np.asarray(dequantize(blocks, GGMLQuantizationType(self.kind)), np.float32)
        return values[:, left - first * size :][:, : right - left]


def open_gguf(file: Path, tokenizer: bool = True) -> Opened:
    """Open a GGUF file: its tensors stay where they are, configuration and tokenizer are written to a temporary folder.

    Args:
        tokenizer: whether tokenizer.json is written, which takes seconds for a large vocabulary.

    Raises:
        ExportError: damaged, of an architecture, a type or a tokenizer that is not supported, or the package gguf is
            not installed.
    """
    package = _package(file)
    files = parts_of(file)
    headers = [read_gguf_header(part) for part in files]
    try:
        return _opened(files, headers, package, tokenizer)
    except NONSENSE as error:
        raise ExportError(f"{file}: its metadata cannot be understood: {error!r}", TRUNCATED) from error


def parts_of(file: Path) -> list[Path]:
    """List the files of a model in order, one of which is given: several where llama.cpp has split it.

    Raises:
        ExportError: parts that are not there; they are named.
    """
    match = PART.fullmatch(file.name)
    if match is None or int(match[3]) < 2:
        return [file]
    found = [file.with_name(f"{match[1]}-{at:05}-of-{match[3]}.gguf") for at in range(1, int(match[3]) + 1)]
    if missing := [part.name for part in found if not part.is_file()]:
        raise ExportError(
            f"{file}: is one of {len(found)} parts of a model, and beside it are missing: {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            "download all of them into one folder",
        )
    return found


def is_projector(file: Path) -> bool:
    """Whether a file is a multimodal projector by its name, as llama.cpp's tools call it."""
    return PROJECTOR in file.name.lower()


def _joined(
    files: Sequence[Path], headers: Sequence[tuple[dict[str, Any], dict[str, Entry]]]
) -> tuple[Metadata, dict[str, tuple[Path, Entry]]]:
    """Return the metadata, which the first part holds, and which file holds which tensor."""
    metadata = headers[0][0]
    found: dict[str, tuple[Path, Entry]] = {}
    for at, (file, (said, entries)) in enumerate(zip(files, headers, strict=True)):
        count, number = int(said.get("split.count") or 1), int(said.get("split.no") or 0)
        if count != len(files) or (count > 1 and number != at):
            raise ExportError(
                f"{file}: says that it is part {number + 1} of {count} of a model; its name makes it part {at + 1} of "
                f"{len(files)}",
                "give parts the names NAME-00001-of-00003.gguf and so on, all in one folder",
            )
        if twice := found.keys() & entries.keys():
            raise ExportError(f"{file}: holds {min(twice)}, which another part also holds", TRUNCATED)
        found |= {name: (file, entry) for name, entry in entries.items()}
    if len(files) > 1 and int(metadata.get("split.tensors.count", len(found))) != len(found):
        raise ExportError(
            f"{files[0]}: expected {metadata['split.tensors.count']} tensors in {len(files)} parts, found {len(found)}",
            "the parts belong to different models: download them again",
        )
    return metadata, found


def _opened(
    files: Sequence[Path], headers: Sequence[tuple[dict[str, Any], dict[str, Entry]]], package: Any, tokenizer: bool
) -> Opened:
    file = files[0]
    metadata, entries = _joined(files, headers)
    _refuse(file, metadata)
    stored: dict[str, Stored] = {name: _stored(at, name, entry, package) for name, (at, entry) in entries.items()}
    kinds = sorted({package.GGMLQuantizationType(entry.kind).name for _, entry in entries.values()} - PLAIN)
    facts = Facts(file, metadata, stored)
    kind = kind_of(facts)
    config = gguf_config(facts, kind)
    tensors: dict[str, Stored] = {}
    for tensor in stored.values():
        for its, part in _parts(tensor, config, kind):
            if known := hf_name(facts, kind, its, config):
                tensors[known] = _undone(part, its, known, config, kind)
    tensors |= _zero_biases(tensors, config, kind)
    tensors |= _activations(facts, kind)
    temporary = Temporary()
    folder = temporary.path / file.name
    folder.mkdir()
    notes = write_small_files(folder, file, metadata, config, tokenizer)
    prefix = f"{facts.architecture}."
    notes += unread(GGUF, {key: value for key, value in metadata.items() if key.removeprefix(prefix) not in facts.seen})
    if facts.guessing:
        notes.append(f"{facts.guessing} layers that guess (nextn_predict_layers) are not read")
    if beside := next(filter(is_projector, sorted(file.parent.glob("*.gguf"))), None):
        notes.append(f"text alone: the projector {beside.name} beside the file is not read ({OWN_CHECKPOINT})")
    if kinds:
        notes = [f"the file is quantized ({', '.join(kinds)}): {LOSS}", *notes]
    left_out = not (folder / TOKENIZER[0]).is_file()
    return Opened(folder, config, tensors, notes, temporary, tokenizer_bytes(metadata) if left_out else 0)


def _package(file: Path) -> Any:
    try:
        import gguf
        import gguf.quants

        return gguf
    except ModuleNotFoundError as error:
        raise ExportError(f"{file}: reading GGUF files needs the package gguf", INSTALL) from error


def _refuse(file: Path, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind == PROJECTOR or metadata.get("general.architecture") == "clip":
        raise UnsupportedModel(
            f"{file}: is a multimodal projector (mmproj), the part of a model that reads pictures or sound; edgespec "
            "reads the text half of GGUF models alone",
            f"give the model's own .gguf file for text; {OWN_CHECKPOINT}",
        )
    if kind != "model":
        raise UnsupportedModel(f"{file}: holds a GGUF {kind}, expected a model", "give the model's own file")


def _stored(file: Path, name: str, entry: Entry, package: Any) -> GgufTensor:
    try:
        kind = package.GGMLQuantizationType(entry.kind)
        size, length = (int(number) for number in package.GGML_QUANT_SIZES[kind])
        package.quants.dequantize(np.zeros((1, length), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{file}: tensor {name} is of ggml type {entry.kind}, which the package gguf cannot dequantize",
            "update it (pip install -U gguf), or export from another quantization",
        ) from error
    if EXPERTS.search(name):  # of all experts, which are below each other here
        kept = 1 if name.endswith(".weight") else 0
        entry = entry._replace(shape=(prod(entry.shape[: len(entry.shape) - kept]), *entry.shape[-kept:][:kept]))
    if len(entry.shape) not in (1, 2):
        raise UnsupportedModel(f"{file}: tensor {name} has shape {list(entry.shape)}; expected one or two lengths")
    n, k = (1, *entry.shape)[-2:]
    if k % size or entry.offset + n * (k // size) * length > file.stat().st_size:
        raise ExportError(f"{file}: tensor {name} of shape {list(entry.shape)} goes beyond its end", TRUNCATED)
    return GgufTensor(file, name, entry.kind, entry.shape, entry.offset, (size, length))


@dataclass(frozen=True, eq=False)
class Held:
    """A vector that a file does not hold as a tensor."""

    file: Path  # of the model
    values: Floats  # [n]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, rows: slice, columns: slice | None) -> Floats:
        return self.values[rows]


def _zero_biases(tensors: Mapping[str, Stored], config: Mapping[str, Any], kind: Kind) -> dict[str, Stored]:
    """Return biases of zeros where some projections have one and others of the same switch in config.json have none."""
    kinds = {"self_attn.": config.get("attention_bias"), "mlp.": config.get("mlp_bias")}
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        bias = name.removesuffix("weight") + "bias"
        if (
            name.endswith("_proj.weight")
            and bias not in tensors
            and any(on and part in name for part, on in kinds.items())
            and not (kind.plain_output and name.endswith("o_proj.weight"))
        ):
            found[bias] = Held(tensor.file, np.zeros(tensor.shape[:1], np.float32))
    return found


XIELU = {"alpha_p": "xielu.alpha_p", "alpha_n": "xielu.alpha_n", "beta": "xielu.beta"}


def _activations(facts: Facts, kind: Kind) -> dict[str, Stored]:
    """Return the learnt numbers of activations, which are metadata of the file.

    Raises:
        ExportError: there is not one for each layer.
    """
    found: dict[str, Stored] = {}
    facts.seen |= {"xielu.eps", *XIELU.values()}
    for name, key in XIELU.items() if kind.model_type == "apertus" else ():
        values = facts.metadata.get(key)
        if not isinstance(values, list) or len(values) != facts.layers:
            raise ExportError(f"{facts.file}: expected {facts.layers} numbers {key}, got {values!r}", TRUNCATED)
        for layer, value in enumerate(values):
            found[f"{kind.at}.{layer}.mlp.act_fn.{name}"] = Held(facts.file, np.array([value], np.float32))
    return found


def _parts(tensor: Stored, config: Mapping[str, Any], kind: Kind) -> list[tuple[str, GgufTensor]]:
    """Split a tensor that holds several modules of a layer -> names as of a file that has each, and the parts."""
    assert isinstance(tensor, GgufTensor)
    start, _, rest = tensor.name.rpartition(".")
    layer, _, module = start.rpartition(".")
    if module in kind.layer or not layer.startswith("blk."):
        return [(tensor.name, tensor)]
    n = tensor.shape[0]
    if module == "attn_qkv":
        query, key = (int(config[name]) * int(config["head_dim"]) for name in
                      ("num_attention_heads", "num_key_value_heads"))  # fmt: skip
        if n != query + 2 * key:
            raise ExportError(f"{tensor.file}: {tensor.name} has {n} rows for {query} and {key}", TRUNCATED)
        ends = np.split(np.arange(n), [query, query + key])
        return [(f"{layer}.attn_{part}.{rest}", tensor.taken(rows)) for part, rows in zip("qkv", ends, strict=True)]
    if module == "ffn_gate_up_exps":
        halves = np.arange(n).reshape(int(config.get("num_experts") or config["num_local_experts"]), 2, -1)
        return [(f"{layer}.ffn_{part}_exps.{rest}", tensor.taken(halves[:, at].ravel()))
                for at, part in enumerate(("gate", "up"))]  # fmt: skip
    return [(tensor.name, tensor)]


def _undone(tensor: GgufTensor, name: str, known: str, config: Mapping[str, Any], kind: Kind) -> Stored:
    """Return the tensor ``known`` of the checkpoint: without what the converter did to ``name``."""
    module = name.split(".", 2)[-1]
    module = module.removesuffix(".weight").removesuffix(".bias")
    if len(tensor.shape) == 2 and known.endswith((".A_log", ".D", ".mamba.norm.weight")):
        tensor = replace(tensor, shape=(prod(tensor.shape),))
    if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    for orders, axis in ((kind.rows, 0), (kind.columns, 1)):
        if module not in orders or axis >= len(tensor.shape):
            continue
        order = orders[module](config)
        if order.length != tensor.shape[axis]:
            raise ExportError(
                f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, but its metadata implies "
                f"{order.length} {'columns' if axis else 'rows'}",
                TRUNCATED,
            )
        places = order.places()
        tensor = replace(tensor, columns=places) if axis else tensor.taken(places)
    if module in kind.logarithms:
        return replace(tensor, undo=lambda values: np.log(-values))
    if kind.minus_one and known.endswith("norm.weight") and not known.endswith("linear_attn.norm.weight"):
        return replace(tensor, undo=lambda values: values - np.float32(1))
    return tensor
