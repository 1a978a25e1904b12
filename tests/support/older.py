"""Bundles as earlier versions wrote them: made of today's by taking back what has changed since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.migration import with_old_names

BEFORE = {"input_ids": "ids", "position_ids": "pos"}
VECTORS = Path(__file__).resolve().parents[1] / "vectors"
NEW = ("standard",)  # graphs that there were not


def rename_weights(model: onnx.ModelProto, before: str, after: str) -> int:
    """Move references of tensors from one weight file to another -> how many."""
    places = [item for tensor in model.graph.initializer for item in tensor.external_data if item.key == "location"]
    renamed = [item for item in places if item.value == before]
    for item in renamed:
        item.value = after
    return len(renamed)


def rename_ports(model: onnx.ModelProto) -> None:
    """Call the inputs of a stock graph as they were called."""
    for value in model.graph.input:
        value.name = BEFORE.get(value.name, value.name)
    for node in _nodes(model.graph):
        node.input[:] = [BEFORE.get(one, one) for one in node.input]


def schema_5() -> list[dict[str, Any]]:
    """Read manifests with every key of schema 5, as the last version with its names wrote them."""
    found: list[dict[str, Any]] = json.loads((VECTORS / "schema_5.json").read_text("utf-8"))
    return found


def schema_2(bundle: Path, folder: Path) -> Path:
    """Make a copy with the manifest, the ports and the names of files of schema 2."""
    shutil.copytree(bundle, folder)
    data = with_old_names(json.loads((folder / MANIFEST).read_text("utf-8")))
    for name in ("target", "draft", "drafter"):
        if name in data:
            _part(folder, data[name], data["files"])
    data["schema_version"] = 2
    for name in list(data["files"]):
        file = folder / name
        data["files"][name] = {"size": file.stat().st_size, "sha256": sha256(file)}
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
    return folder


def _part(folder: Path, part: dict[str, Any], files: dict[str, Any]) -> None:
    del part["converted"]
    for name in NEW:
        if gone := part["graphs"].pop(name, None):
            (folder / gone["file"]).unlink()
            del files[gone["file"]]
    main = next(name for name in ("gated", "strict", "plain", "native") if name in part["graphs"])
    for name, graph in part["graphs"].items():
        path = folder / graph["file"]
        model = onnx.load(path, load_external_data=False)
        for operators in ("stock", "native"):
            rename_weights(model, f"model.{operators}.data", "model.data")
        if graph.get("operators", "stock") == "stock":
            rename_ports(model)
        path.write_bytes(model.SerializeToString())
        if name == main and name != "native":
            del files[graph["file"]]
            graph["file"] = str(Path(graph["file"]).with_name("model.onnx"))
            files[graph["file"]] = {}
            path.rename(folder / graph["file"])


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
