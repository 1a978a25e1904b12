"""Models whose heads are of any size, and whether rows of a pass have plain decoding's bits at any depth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx

from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.bundle.writer import write_manifest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.support import hf

LONGEST = 8192
_WRITTEN = 100  # tokens after the first row of a pass that it may write, dummies included


def wide_config(head_dim: int, layers: int = 1, positions: int = LONGEST) -> hf.Config:
    """Two queries a key, so that heads of one key are two threads' work."""
    return {
        "model_type": "llama",
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": hf.BOS,
        "eos_token_id": hf.EOS,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
    }


def stock_model(folder: Path, head_dim: int, form: Format, threads: int, positions: int = LONGEST) -> Model:
    """Make the strict graph of a model of one layer, written into ``folder``."""
    source, made = folder / f"source-{head_dim}", folder / f"{form}-{head_dim}"
    hf.write_checkpoint(source, wide_config(head_dim, positions=positions), seed=head_dim)
    made.mkdir()
    part = write_model(made, open_model(source, None), ModelSpec(form, layout="stock")).part
    return Model(made, part, "strict", threads)


def wide_bundle(folder: Path, exact: bool = True) -> Path:
    """Make a bundle for stock operators of a model with heads of 256; the draft is the model itself.

    Args:
        folder: made here.
        exact: False = logits times the tokens of a pass: other bits on every processor, and no other choice.
    """
    folder.mkdir()
    source = str(hf.write_checkpoint(folder / "source", wide_config(256, layers=3, positions=512), seed=5))
    options = ExportOptions(source, folder / "bundle", ["speculative"], "int4", draft=source, operators="stock")
    export_model(options, golden=False)
    if not exact:
        _scale_by_rows(options.output)
    return options.output


def _scale_by_rows(bundle: Path) -> None:
    """Multiply the strict graph's logits by the tokens of the pass."""
    file = bundle / "model.strict.onnx"
    model = onnx.load(file, load_external_data=False)
    graph, node = model.graph, onnx.helper.make_node
    graph.node[-1].output[0] = "unscaled"  # [1, rows, vocab]
    graph.node.extend(
        [
            node("Size", ["input_ids"], ["tokens"]),
            node("Cast", ["tokens"], ["scale"], to=onnx.TensorProto.FLOAT),
            node("Mul", ["unscaled", "scale"], ["logits"]),
        ]
    )
    onnx.save(model, file)
    write_manifest(bundle, read_manifest(bundle))


class Depths:
    """A slot of stock operators at any depth without a prefill: tokens far before a pass are random.

    Keys and values of a model of one layer depend only on token and position.  So a pass at that place computes those
    that it may read, of its own rows or of single rows, for any text before it.

    Args:
        model: of one layer, whose rows are compared.
        longest: tokens that are filled.
    """

    def __init__(self, model: Model, longest: int = LONGEST) -> None:
        self._slot = open_slot(model, reserve=longest)
        generator = np.random.default_rng(0)
        self._tokens: list[int] = generator.integers(2, self._slot.vocab_size, longest).tolist()
        self._arrays = self._slot.take_up(self._tokens, longest)  # each [kv_heads, longest, head_dim]
        self._filled = [generator.standard_normal(array.shape, np.float32) for array in self._arrays]
        self._alone: dict[int, bytes] = {}
        self._own: set[int] = set()  # places whose keys and values are the tokens' own
        for array, filled in zip(self._arrays, self._filled, strict=True):
            array[:] = filled

    def rows(self, past: int, count: int) -> list[bytes]:
        """Give the bits of each row's logits in a pass after ``past`` tokens."""
        self._slot.tokens = self._tokens[:past]
        logits = self._slot.forward(np.array(self._tokens[past : past + count], np.int64)).logits
        bits = [row.tobytes() for row in logits]
        behind = slice(past, past + count + _WRITTEN)  # dummies also leave keys and values
        for array, filled in zip(self._arrays, self._filled, strict=True):
            filled[:, past : past + count] = array[:, past : past + count]
            array[:, behind] = filled[:, behind]
        self._own.update(range(past, past + count))
        return bits

    def differing(self, passes: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return (tokens before, rows, row) of those whose bits differ from a pass of only that row."""
        found: list[tuple[int, int, int]] = []
        wanted = list(passes)
        for past, count in wanted:
            if not self._own.issuperset(range(past, past + count)):
                self.rows(past, count)
        for past, count in wanted:
            for row, bits in enumerate(self.rows(past, count)):
                if past + row not in self._alone:
                    (self._alone[past + row],) = self.rows(past + row, 1)
                if bits != self._alone[past + row]:
                    found.append((past, count, row))
        return found


def crossing(at: int, sizes: Iterable[int], longest: int = LONGEST) -> list[tuple[int, int]]:
    """Return (tokens before, rows) of passes that end at, begin at and cross ``at`` tokens."""
    found = {(past, n) for n in sizes for past in (at - n - 1, at - n, at - n // 2 - 1, at - 2, at - 1, at)}
    return sorted((past, n) for past, n in found if past >= 0 and past + n <= longest)


def walk(longest: int, most: int = 32) -> list[tuple[int, int]]:
    """List passes of 2, 3, .. ``most`` rows one after the other, over every length up to ``longest``."""
    found: list[tuple[int, int]] = []
    past = 0
    while past + 2 <= longest:
        found.append((past, min(2 + len(found) % (most - 1), longest - past)))
        past += found[-1][1]
    return found
