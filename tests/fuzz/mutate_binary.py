"""Mutations of graphs, programs of native operators, safetensors, GGUF, templates and plain bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import onnx
from onnx import TensorProto, helper

from tests.fuzz.mutate_json import flipped, mutated_json

NUMBERS = (-1, 0, 1, 2, 3, 15, 64, 1000, 65536, 2**24, 2**30, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1)
TEMPLATES = (
    "{{ 'a' * 10**10 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for a in messages %}{{ a.content",
    "{{ 10**10**8 }}",
    "{% set l = [messages] %}{% for i in range(60) %}{% set l = [l, l] %}{% endfor %}{{ l }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
)


def mutated_bytes(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Bits, ends, or everything."""
    how = rng.choice(("flip", "cut", "grow", "nan", "zero", "empty"))
    if how == "cut":
        return data[: rng.randrange(len(data) + 1)], "cut"
    if how == "grow":
        return data + bytes(rng.randrange(1, 5000)), "grown"
    if how in ("nan", "zero"):
        return (b"\xff" if how == "nan" else b"\x00") * len(data), how
    return (b"", "empty") if how == "empty" else (flipped(data, rng), "bits")


def mutated_template(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Put a costly or broken piece somewhere."""
    piece, at = rng.choice(TEMPLATES), rng.choice((0, len(data), rng.randrange(len(data) + 1)))
    return (flipped(data, rng), "bits") if rng.random() < 0.2 else (data[:at] + piece.encode() + data[at:], piece)


def mutated_program(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change the text of a native node's program: a line or a number of it."""
    lines = data.decode("utf-8").split("\n")
    said = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, how = (
            rng.randrange(len(lines)),
            rng.choice(("number", "number", "number", "drop", "twice", "swap", "word", "bits")),
        )
        words = lines[at].split(" ")
        if how == "number" and len(words) > 1:
            word = rng.randrange(1, len(words))
            key, equals, _ = words[word].rpartition("=")
            words[word] = f"{key}{equals}{rng.choice(NUMBERS)}"
            lines[at] = " ".join(words)
        elif how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "swap":
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif how == "word":
            lines[at] = lines[at].replace(
                words[0], rng.choice(("quantize", "linear", "glu", "gate", "logits", "x", "")), 1
            )
        else:
            lines[at] = flipped(lines[at].encode(), rng).decode("latin-1")
        said.append(f"{how} {lines[at][:60] if at < len(lines) else ''}")
        if not lines:
            break
    return "\n".join(lines).encode("utf-8", "replace"), "; ".join(said)


def mutated_graph(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change an ONNX graph: nodes, tensors, their places; or its bytes."""
    if rng.random() < 0.15:
        return flipped(data, rng), "bits"
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception:  # mutated before
        return flipped(data, rng), "bits"
    said = [rng.choice(GRAPH)(model.graph, rng) for _ in range(rng.choice((1, 1, 2)))]
    return model.SerializeToString(), "; ".join(said)


def _tensor(graph: onnx.GraphProto, rng: Random) -> str:
    one = rng.choice(graph.initializer)
    how = rng.choice(("dims", "type", "external", "raw", "rank"))
    if how == "dims" and one.dims:
        one.dims[rng.randrange(len(one.dims))] = rng.choice(NUMBERS)
    elif how == "type":
        one.data_type = rng.choice((0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 16, 21, 22, 23, 99))
    elif how == "external" and one.external_data:
        entry = rng.choice(one.external_data)
        entry.value = rng.choice(
            (*map(str, NUMBERS), "", "/etc/passwd", "../x", "tokenizer.json", "1e9", "edgespec.json")
        )
    elif how == "raw" and one.raw_data:
        one.raw_data = flipped(one.raw_data, rng)
    else:
        one.dims.extend([rng.choice((1, 2, 2**40))] * rng.choice((1, 3, 9)))
    return f"{how} of {one.name[-30:]}"


def _node(graph: onnx.GraphProto, rng: Random) -> str:
    if not graph.node:
        return "no node"
    node = rng.choice(graph.node)
    how = rng.choice(("kind", "input", "drop", "attribute", "twice", "program", "program"))
    if how == "kind":
        node.op_type = rng.choice(
            ("Add", "Mul", "MatMul", "Expand", "Range", "Loop", "Scan", "Tile", "NoSuch", "Identity")
        )
    elif how == "input" and node.input:
        names = [name for other in graph.node for name in (*other.input, *other.output)]
        names += [one.name for one in graph.initializer]
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif how == "drop":
        graph.node.remove(node)
    elif how == "attribute" and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.f = rng.choice(NUMBERS), rng.choice((0.0, 1e38, float("nan")))
    elif how == "program":
        for attribute in node.attribute:
            if attribute.name == "program":
                attribute.s, said = mutated_program(attribute.s, rng)
                return f"program: {said}"
    else:
        graph.node.add().CopyFrom(node)
    return f"{how} of {node.op_type}"


def _giant(graph: onnx.GraphProto, rng: Random) -> str:
    """Something that makes gigabytes of nothing, in the way of the logits."""
    kind = rng.choice(("Range", "ConstantOfShape", "Expand", "Outer", "Tile"))
    many = 2**40 if rng.random() < 0.3 else 2**34
    one = helper.make_tensor("giant.many", TensorProto.INT64, [2], [2**17, many >> 17])
    zero = helper.make_tensor("giant.zero", TensorProto.INT64, [], [0])
    step = helper.make_tensor("giant.step", TensorProto.INT64, [], [1])
    end = helper.make_tensor("giant.end", TensorProto.INT64, [], [many])
    column = helper.make_tensor("giant.column", TensorProto.FLOAT, [1 << 18, 1], b"\0" * (4 << 18), raw=True)
    line = helper.make_tensor("giant.row", TensorProto.FLOAT, [1, 1 << 18], b"\0" * (4 << 18), raw=True)
    graph.initializer.extend([one, zero, step, end, column, line])
    inputs = {
        "Range": ["giant.zero", "giant.end", "giant.step"],
        "ConstantOfShape": ["giant.many"],
        "Expand": ["giant.zero", "giant.many"],
        "Outer": ["giant.column", "giant.row"],
        "Tile": ["giant.column", "giant.many"],
    }[kind]
    made = helper.make_node("Mul" if kind == "Outer" else kind, inputs, ["giant.made"])
    size = helper.make_node("ReduceMax", ["giant.made"], ["giant.least"], keepdims=0)
    cast = helper.make_node("Cast", ["giant.least"], ["giant.float"], to=TensorProto.FLOAT)
    last = next((node for node in graph.node if "logits" in node.output), None)
    if last is not None:
        last.output[list(last.output).index("logits")] = "giant.before"
        graph.node.extend([made, size, cast, helper.make_node("Add", ["giant.before", "giant.float"], ["logits"])])
    return f"giant {kind}"


def _ports(graph: onnx.GraphProto, rng: Random) -> str:
    port = rng.choice([*graph.input, *graph.output])
    kind = port.type.tensor_type
    how = rng.choice(("name", "type", "dim", "drop", "initializer"))
    if how == "name":
        port.name += "x"
    elif how == "type":
        kind.elem_type = rng.choice((1, 6, 7, 9, 10))
    elif how == "dim" and kind.shape.dim:
        rng.choice(kind.shape.dim).dim_value = rng.choice(NUMBERS)
    elif how == "initializer":
        graph.initializer.append(helper.make_tensor(port.name, kind.elem_type or 1, [1, 64], [0] * 64))
    elif port in graph.input:
        graph.input.remove(port)
    return f"port {how} {port.name}"


Change = Callable[[onnx.GraphProto, Random], str]
GRAPH: tuple[Change, ...] = (_tensor, _tensor, _node, _node, _node, _giant, _ports)


def mutated_safetensors(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change the header's JSON, its length, what its tensors are, or the bytes."""
    if len(data) < 8 or rng.random() < 0.25:
        return mutated_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.5:
        header, said = mutated_json(header, rng)
        size = len(header) if rng.random() < 0.85 else rng.choice(NUMBERS)
        return struct.pack("<q", size) + header + rest, f"header: {said}"
    value = json.loads(header)
    said = _sound_header(value, rng)
    header = json.dumps(value).encode()
    return struct.pack("<q", len(header)) + header + rest, f"header: {said}"


def _sound_header(value: dict[str, Any], rng: Random) -> str:
    """Make a change that the format allows, so that it reaches the reader of the tensors."""
    name, other = rng.choices([name for name in value if name != "__metadata__"], k=2)
    one = value[name]
    size = one["data_offsets"][1] - one["data_offsets"][0]
    how = rng.choice(("swap", "rename", "reshape", "flat", "type", "drop"))
    if how == "swap":
        value[name], value[other] = value[other], value[name]
    elif how == "rename":
        value[rng.choice((name + ".weight", name.replace("0", "99"), name.replace("weight", "bias"), "", "x"))] = one
    elif how == "reshape":
        one["shape"] = rng.choice((one["shape"][::-1], [*one["shape"], 1], [1, *one["shape"]]))
    elif how == "flat":
        one |= {"dtype": "U8", "shape": [size]}
    elif how == "type":
        sizes = {"I64": 8, "F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "BOOL": 1, "F8_E4M3": 1}
        kind = rng.choice(list(sizes))
        one |= {"dtype": kind, "shape": [*one["shape"][:-1], -1]}
        rows = max(1, prod(one["shape"][:-1]))
        one["shape"][-1] = size // sizes[kind] // rows
    else:
        del value[name]
    return f"{how} of {name[-40:]}"


def mutated_gguf(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change a number of the header, or its bytes; the tensors' data are the least of it."""
    if rng.random() < 0.2:
        return flipped(data[: 1 << 15], rng) + data[1 << 15 :], "bits of the header"
    places = gguf_numbers(data)
    # the tokens' lengths are most: every kind of number is as likely as any other
    kind = rng.choice(sorted({kind for kind, _, _ in places}))
    _, at, size = rng.choice([place for place in places if place[0] == kind])
    near = int.from_bytes(data[at : at + size], "little") + rng.choice((-1, 1, 2, 31))
    number = rng.choice((*NUMBERS, near, near, near, near))
    written = struct.pack("<Q", number & (2**64 - 1))[:size]
    return data[:at] + written + data[at + size :], f"{kind} at {at}: {number}"


def gguf_numbers(data: bytes) -> list[tuple[str, int, int]]:
    """Kind, offset and size of every number of a header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    text, array = 8, 9
    places = [("version", 4, 4), ("tensors", 8, 8), ("entries", 16, 8)]
    at = 24

    def number(kind: str, size: int) -> int:
        nonlocal at
        if at + size > len(data):  # mutated before: counts that nothing follows have no end
            raise ValueError("cut off")
        places.append((kind, at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def string(kind: str) -> None:
        nonlocal at
        at += number(kind, 8)

    def value(kind: int, name: str) -> None:
        nonlocal at
        if kind == text:
            string(name + " length")
        elif kind == array:
            kind, count = number("element type", 4), number("element count", 8)
            if kind in (text, array):
                for _ in range(count):
                    value(kind, "element")
            else:
                number("element", sizes[kind])
                at += sizes[kind] * (count - 1)
        else:
            number(name, sizes[kind])

    tensors, entries = (int.from_bytes(data[start : start + 8], "little") for start in (8, 16))
    for _ in range(entries):
        string("key length")
        value(number("type", 4), "value")
    for _ in range(tensors):
        string("name length")
        for _ in range(number("dimensions", 4)):
            number("dimension", 8)
        number("tensor type", 4)
        number("tensor offset", 8)
    return places


def mutated_lines(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Token ids as int32, as in head_vocab.bin."""
    made = bytearray(data)
    at = 4 * rng.randrange(max(1, len(made) // 4))
    made[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & (2**32 - 1))
    return (bytes(made), "a token") if rng.random() < 0.6 else mutated_bytes(data, rng)


def tokenizer_bomb(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Make a tokenizer.json whose work or memory has no bound, or whose library panics."""
    value = json.loads(data)
    kind = rng.choice(("regex", "replace", "template", "prepend", "merges", "unigram", "added"))
    if kind == "regex":
        pattern = {"Regex": rng.choice(("(a+)+$", "(.*)*b", "((a|a)+)+c", "(?:x+x+)+y", "\\p{L}{1,100000}", "("))}
        value["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    elif kind == "replace":
        steps = [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 2} for _ in range(rng.choice((5, 40)))
        ]
        value["normalizer"] = {"type": "Sequence", "normalizers": steps}
    elif kind == "prepend":
        value["normalizer"] = {"type": "Prepend", "prepend": "a" * 10_000_000}
    elif kind == "template":
        token = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        named = {"<s>": {"id": "<s>", "ids": [0] * 1000, "tokens": ["<s>"] * 1000}}
        value["post_processor"] = {"type": "TemplateProcessing", "single": [token] * 100_000, "pair": []}
        value["post_processor"]["special_tokens"] = named
    elif kind == "merges":
        value["model"]["merges"] = [["a", "nosuch"]] * 3
    elif kind == "unigram":
        value["model"] = {"type": "Unigram", "unk_id": rng.choice((0, 5, -1)), "vocab": [], "byte_fallback": True}
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | {"special": True, "normalized": True}
        many = range(rng.choice((3, 100_000)))
        value["added_tokens"] = [{"id": 2**31 + i, "content": f"t{i}", **flags} for i in many]
    return json.dumps(value).encode(), f"tokenizer {kind}"
