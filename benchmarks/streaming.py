"""Measure a model larger than its memory: resident, mapped and streamed.

    python -m benchmarks.streaming MODEL BUNDLE FOLDER [--hidden 2048] [--inner 768] [--times 8] [--share 0.25]

A FOLDER that exists is measured as it is, a bundle of any model, and the other two are not read.  Else MODEL is a
trained mixture (a folder of safetensors), BUNDLE its int4 export.  FOLDER gets a bundle of the same model made large:
hidden states and experts are padded with zeros, so it writes the same text and routes the same tokens to the same
experts.  Each layer is repeated ``--times`` times; the repeated ones choose experts as their layer does, and add
nothing.  So every layer has the routes of a trained one.

Each way runs in a separate process: ``resident`` without a limit, ``mapped`` and ``streamed`` in a control group with
``--share`` of the weights as its memory, where the system allows to make one (``limited`` in the output).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, show
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.bundle.model import plan_model
from edgespec.export.bundle.model_part import FINAL_NORM, INDEX, NATIVE, ModelSpec, counted
from edgespec.export.emit.fill import fill
from edgespec.export.emit.plan import WEIGHTS
from edgespec.export.emit.plans import index_text
from edgespec.export.emit.program import native_graph
from edgespec.export.quantization import levels as quantize
from edgespec.export.source.source import Checkpoint
from edgespec.planning.memory_budget import OFF
from edgespec.planning.speed import read_bandwidth, speed_of
from edgespec.planning.streaming import read_at_once, seen_reads, streaming_of
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.slots.expert_store import disk_rate
from edgespec.runtimes.slots.shared import Model

LAYER = "model.layers."
GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1; of version 2 the folder above
ROOM = 0.9  # of a control group that a budget takes: the kernel counts more than resident memory
PROMPT = "ROMEO:\nWhat say you, my lord?\n\n"


@dataclass(frozen=True)
class Padded:
    """A tensor with zeros after its rows and columns."""

    file: Path
    shape: tuple[int, ...]
    values: Callable[[], NDArray[np.float32]]

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """Read some rows, and columns of a matrix."""
        own = self.values()
        whole = np.zeros(self.shape, np.float32)
        whole[tuple(slice(size) for size in own.shape)] = own
        return whole[rows] if columns is None else whole[rows][:, columns]


def enlarged(small: Architecture, config: dict[str, Any], hidden: int, inner: int, times: int) -> Architecture:
    """Make the large model of a small one."""
    source, facts = small.source, small.facts
    assert facts.experts is not None
    file, tensors = source.path / "config.json", dict[str, Any]()
    shrink = facts.hidden / hidden

    def add(name: str, shape: tuple[int, ...], of: str, by: float = 1.0, rows: slice = slice(None)) -> None:
        tensors[name] = Padded(file, shape, lambda: np.float32(by) * source.read(of, rows))

    heads = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    add("model.embed_tokens.weight", (facts.vocab, hidden), "model.embed_tokens.weight")
    add("model.norm.weight", (hidden,), "model.norm.weight", shrink**0.5)
    for layer in range(facts.layers * times):
        real, at, of = layer % times == times - 1, f"{LAYER}{layer}", f"{LAYER}{layer // times}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}.{norm}.weight", (hidden,), f"{of}.{norm}.weight", shrink**0.5)
        for name, size in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
            add(f"{at}.self_attn.{name}_proj.weight", (size, hidden), f"{of}.self_attn.{name}_proj.weight")
        for name in ("q_norm", "k_norm"):
            add(f"{at}.self_attn.{name}.weight", (facts.head_dim,), f"{of}.self_attn.{name}.weight")
        add(f"{at}.self_attn.o_proj.weight", (hidden, heads[0]), f"{of}.self_attn.o_proj.weight", float(real))
        add(f"{at}.mlp.gate.weight", (facts.experts.count, hidden), f"{of}.mlp.router.weight")
        for expert in range(facts.experts.count):
            for name, shape, size in (
                ("gate", (inner, hidden), facts.experts.inner),
                ("up", (inner, hidden), facts.experts.inner),
                ("down", (hidden, inner), facts.hidden),
            ):
                rows, by = slice(expert * size, (expert + 1) * size), float(real or name != "down")
                own = f"{of}.mlp.experts.{name}.weight"
                add(f"{at}.mlp.experts.{expert}.{name}_proj.weight", shape, own, by, rows)
    changes = {
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": facts.layers * times,
        "rms_norm_eps": config["rms_norm_eps"] * shrink,
    }
    changes |= {"layer_types": None} if config.get("layer_types") else {}
    return architecture(Checkpoint(source.path, config | changes, tensors, [], None))


def write(model: Path, bundle: Path, folder: Path, hidden: int, inner: int, times: int) -> None:
    """Write the large bundle, of which repeated layers share what is packed."""
    small = architecture(Checkpoint.open(model))
    config = json.loads((model / "config.json").read_text("utf-8"))
    arch = enlarged(small, config, hidden, inner, times)
    limit = read_manifest(bundle).target.facts.context
    arch.facts = arch.facts.model_copy(update={"context": limit})
    shutil.copytree(bundle, folder)
    plan = plan_model(arch, ModelSpec("int4"))
    native, known = plan.plans["native"], dict[tuple[Any, ...], list[bytes]]()
    native_graph(native).save(folder / NATIVE)
    experts = [name for _, name in native.contents if ".experts." in name]
    native.contents = [(kind, name) for kind, name in native.contents if name not in experts]
    fill(folder / WEIGHTS, native)
    with (folder / WEIGHTS).open("r+b") as file:
        for name in experts:
            layer, part = int(name.removeprefix(LAYER).split(".")[0]), name.split(".")[-2]
            silent = part == "down" and layer % times != times - 1
            key = (part, None if silent else layer // times)
            if key not in known:
                known = {kept: value for kept, value in known.items() if kept[1] in (None, layer // times)}
                packed = native.matrices[name].packed
                assert packed is not None
                rows = (arch.source.read(name, slice(at, at + 4096)) for at in range(0, packed.n, 4096))
                levels = (quantize.quantize_block(one, quantize.BLOCKS["int4"]) for one in rows)
                known[key] = [piece.tobytes() for piece in packed.pack_blocks(levels)]
            file.seek(native.entries[f"{name}.packed"].offset)
            file.writelines(known[key])
    (folder / INDEX).write_text(index_text(plan.plans), "utf-8")
    np.stack([arch.source.read(arch.final_norm.weight)]).astype("<f4").tofile(folder / FINAL_NORM)
    data = json.loads((folder / MANIFEST).read_text("utf-8"))
    old = data["target"]
    new = plan.part.model_copy(update={"facts": counted(arch)}).model_dump(mode="json")
    data["target"] = old | {key: new[key] for key in ("facts", "low_nibble_bytes")}
    for path in (name for name in data["files"] if (folder / name).is_file()):
        data["files"][path] = {"size": (folder / path).stat().st_size, "sha256": _digest(folder / path)}
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """Make a control group below this process's with that much memory; None = the system does not allow it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if line.split(":")[1] == "memory"), None)
    group = None if own is None else GROUPS / own.lstrip("/") / f"edgespec-{os.getpid()}"
    try:
        if group is not None:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        group = None
    try:
        yield group
    finally:
        if group is not None and group.is_dir():
            group.rmdir()


def run(
    folder: Path, way: str, method: str, budget: int | None, limit: int, seconds: float, least: int
) -> dict[str, Any]:
    """Run one way in a separate process, after the system has forgotten the file."""
    if hasattr(os, "posix_fadvise"):  # cached pages that another process was charged for count for no control group
        with (folder / WEIGHTS).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with limited(limit) if way != "resident" else limited(1 << 62) as group:
        command = [
            sys.executable,
            "-m",
            "benchmarks.streaming",
            "--child",
            str(folder),
            method,
            str(seconds),
            str(least),
        ]
        command += [str(budget or OFF), str(group or "")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:], "status": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"limited": group is not None}


def context_of(folder: str | Path) -> int:
    """Choose a context that the bundle has."""
    return min(1024, read_manifest(Path(folder)).target.facts.context)


def child(folder: str, method: str, seconds: str, least: str, budget: str, group: str) -> None:
    """Decode for some seconds, and at least some tokens, and print figures."""
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    threads = min(2, os.cpu_count() or 1)
    engine = load(folder, threads=threads, context=context_of(folder), budget=budget, prompt_cache=False)
    sampling = SamplingParams(temperature=1.0, seed=1)  # a greedy text of a small model repeats itself
    settings = Settings(method=method, max_new_tokens=context_of(folder) // 2, ignore_eos=True, sampling=sampling)
    begun = time.perf_counter()
    first, tokens, written = 0.0, 0, list[int]()
    experts = engine.model.experts if isinstance(engine.model, Model) else None
    stream = engine.stream(PROMPT, settings)
    for piece in stream:
        if not first:
            first = time.perf_counter()
            if experts is not None:
                experts.forget_counts()
            continue
        if piece.round is not None:
            tokens += len(piece.round.tokens)
            written += piece.round.tokens
        if time.perf_counter() - first > float(seconds) and tokens >= int(least):
            break
    taken = time.perf_counter() - first
    figures: dict[str, Any] = {
        "tokens_per_second": tokens / taken,
        "tokens": tokens,
        "first_token": first - begun,
        "peak": peak_bytes(),
    }
    if experts is not None:
        counts = experts.counts()
        figures |= {
            "hits": counts.hit_rate,
            "bytes_per_token": counts.bytes / max(1, tokens),
            "waited": counts.waited / taken,
            "distinct_by_rows": experts.distinct_by_rows(),
            "cache": experts.slots * experts.slot_bytes,
            "experts": experts.expert_bytes,
            "reads": experts.reads,
        }
    stream.close()
    engine.close()
    show(figures | {"text": hashlib.sha256(str(written[:24]).encode()).hexdigest()[:12]})


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "bundle", "folder"):
        parser.add_argument(name, type=Path)
    for name, default in (("hidden", 2048), ("inner", 768), ("times", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=0, help="and at least this many tokens")
    parser.add_argument("--ways", default="resident,mapped,streamed,drafts")
    parser.add_argument("--turns", type=int, default=1, help="runs of each way, in turns; a way's figures are of each")
    given = parser.parse_args()
    if not given.folder.exists():
        write(given.model, given.bundle, given.folder, given.hidden, given.inner, given.times)
    manifest = read_manifest(given.folder)
    weights = manifest.files[WEIGHTS].size
    limit = int(given.share * weights)
    budget = int(ROOM * limit)
    ways = given.ways.split(",")
    found: dict[str, Any] = {way: [] for way in ways}
    for turn in range(given.turns):
        for way in ways if turn % 2 == 0 else reversed(ways):
            method, streams = ("auto" if way == "drafts" else "ar"), way in ("streamed", "drafts")
            used = budget if streams else None
            found[way].append(run(given.folder, way, method, used, limit, given.seconds, given.tokens))
    rates = {
        name: disk_rate(given.folder / WEIGHTS, *read_at_once(manifest), 1.0, checked)
        for name, checked in (("disk", False), ("disk_checked", True))
    }
    disk = rates["disk_checked"]
    cache = next((one.get("cache") for one in found.get("streamed", [])), None)
    use = replace(RunOptions(context=context_of(given.folder)), expert_cache=cache)
    seen = seen_reads(manifest)
    speed = speed_of(manifest, use, bandwidth=read_bandwidth(2), depth=64, disk=disk, hits=seen)
    streaming = streaming_of(manifest, use, disk, seen)
    planned = {"tokens_per_second": speed.tokens_per_second} | (asdict(streaming) if streaming else {})
    show(conditions(weights=weights, limit=limit, **rates, planned=planned, ways=found))


if __name__ == "__main__":
    main()
