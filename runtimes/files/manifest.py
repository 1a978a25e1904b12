"""The manifest of a bundle (``edgespec.json``): its schema, and reading it with errors a person can act on."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from edgespec.errors import BundleError

SCHEMA = 2
MANIFEST = "edgespec.json"

Format = Literal["fp32", "int4", "int8", "w8a8"]
Layout = Literal["stock", "native"]
Operators = Literal["stock", "native"]
Precision = Literal["fp32", "fp16"]
Origin = Literal["edgespec", "optimum"]
Learnt = Literal["int4", "nomad1", "nomad2"]
Attention = Literal["f32", "f16", "int8", "int4", "nomad", "nomad2"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")  # of activations, in graphs for devices
FORMATS: tuple[Format, ...] = ("int4", "int8", "w8a8", "fp32")
# architectures that edgespec emits itself, for all methods
EMITTED = (
    "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or ":" in path:
        raise ValueError(f"path {path!r} leaves the bundle: only relative paths inside the folder are allowed")
    return path


InsidePath = Annotated[str, AfterValidator(_inside)]


class _Part(BaseModel):
    """Common settings: unknown keys are errors, so that a typo in a manifest cannot pass silently."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFacts(_Part):
    """What decoding and planning need to know of a model; sizes in elements."""

    architecture: str
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab: int = Field(gt=0)
    context: int = Field(gt=0, description="most tokens of one sequence")
    rope: dict[str, float | int | str | list[float]] = Field(default_factory=dict)
    tied: bool = False
    parameters: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


class SkipSetPart(_Part):
    """Layers whose attention / MLP a self-draft leaves out."""

    attention: list[int] = Field(default_factory=list)
    mlp: list[int] = Field(default_factory=list)


class Graph(_Part):
    """One ONNX file of a model.

    ``gated``: sub-layers can be left out pass by pass.  ``padded``: attention gets a dummy row, so ``pos`` and ``bias``
    have a row more than ``ids``.  ``hidden``: hidden states can be had and fed, and heads computed, pass by pass.
    ``device``: what it was written for (docs/devices.md), and ``precision``: of its activations, keys and values.
    """

    file: InsidePath
    device: Literal["cpu", "webgpu"] = "cpu"
    precision: Precision = "fp32"
    gated: bool = False
    padded: bool = False
    hidden: bool = False
    operators: Operators = "stock"
    skip: SkipSetPart | None = Field(default=None, description="sub-layers that it leaves out")


def graph_name(device: str, precision: Precision, which: str = "") -> str:
    """What a device's graph is called in ``ModelPart.graphs``; see ``DeviceModel.open`` for ``which``."""
    name = device if precision == "fp32" else f"{device}-{precision}"
    return f"{name}/{which}" if which else name


class AttentionGate(_Part):
    """How far an attention format is from exact keys, teacher-forced on text that nothing was learnt from.

    ``perplexity_change``: relative, 0.01 = 1 % higher; ``agreement``: share of equal likeliest tokens.
    """

    perplexity_change: float
    agreement: float
    passed: bool


class AttentionPart(_Part):
    """How native operators keep keys and values of a model: the default, and what coded keys were learnt with.

    ``tables``: a safetensors file with the entries ``learnt`` (docs/attention.md); ``gates``: by attention, measured on
    ``positions`` positions with up to ``depth`` tokens before them.
    """

    default: Attention
    tables: InsidePath | None = None
    learnt: list[Learnt] = Field(default_factory=list)
    gates: dict[Attention, AttentionGate] = Field(default_factory=dict)
    positions: int = 0
    depth: int = 0
    text: str | None = None
    text_sha256: str | None = None


class HeadGroup(_Part):
    """Heads beside the LM head that a graph can compute from hidden states; one gate switches a group.

    A group turns a row of hidden states after the final norm, h, into ``count`` rows for an LM head:

    * medusa: y_i = h + silu(W_i h + b_i)  (arXiv 2401.10774);
    * blockwise: y_i = h + (W' silu(W h + b) + b')_i, W [inner, hidden], W' [count * hidden, inner]  (arXiv 1811.03115);
    * exit: y = T h, where the residual stream of layer ``layer`` stands in for the last one's  (arXiv 2506.03700).

    ``own``: each has an LM head of its own; else they share the model's, or the cut one where there is one.
    """

    name: str
    kind: Literal["medusa", "blockwise", "exit"]
    count: int = Field(gt=0)
    inner: int = Field(default=0, ge=0)
    own: bool = False
    layer: int = Field(default=0, ge=0, description="of an exit: layers that have run")


class HeadVocab(_Part):
    """The tokens that a cut LM head scores, in the order of its rows.

    ``file``: their ids, little-endian int32 [size], ascending.  Other tokens are never guessed, which is lossless.
    """

    file: InsidePath
    size: int = Field(gt=0)


class ModelPart(_Part):
    """A model of the bundle: its facts, its format and its graphs over one weight file.

    ``layout``: the operators whose layout the weights have; for the others they are repacked, by ``index``.
    ``origin``: who wrote the graphs; optimum's concatenate keys and values (docs/bundle.md) and run chains alone.
    """

    facts: ModelFacts
    format: Format
    quantizer: str = Field(default="rtn", description="how int4 and int8 levels were chosen")
    head_format: Format | None = Field(default=None, description="of LM head and tied embedding, if not ``format``")
    graphs: dict[str, Graph]
    weights: InsidePath
    index: InsidePath | None = None
    layout: Layout = "stock"
    headroom: int = Field(gt=0, description="rows beyond the context that the position tables cover")
    min_rows: int = Field(ge=0, description="fewest rows that may reach the LM head")
    attention: AttentionPart | None = None
    heads: list[HeadGroup] = Field(default_factory=list)
    head_vocab: HeadVocab | None = Field(default=None, description="of heads; of a draft: of its only LM head")
    cut: bool = Field(default=False, description="the only LM head is the cut one: a draft")
    origin: Origin = "edgespec"

    @property
    def main(self) -> str:
        """The graph that can run every method: gated if there is one, else strict, else plain."""
        return next(name for name in ("gated", "strict", "plain") if name in self.graphs)


class Measured(_Part):
    """A measured acceptance: P(accepted | offered) by draft position, and on what it was measured."""

    acceptance: list[float]
    positions: int
    text: str
    text_sha256: str


class MethodPart(_Part):
    """Parameters of one decoding method."""

    gamma: int = Field(default=4, gt=0)
    skip: SkipSetPart | None = None
    heads: list[str] = Field(default_factory=list, description="names of the model's head groups it uses")
    ranks: list[list[float]] = Field(
        default_factory=list,
        description="[head][rank]: share of held-out positions where the head's guess of that rank is right",
    )
    threshold: float | None = Field(default=None, description="paradecode: confidence from which an exit is taken")
    branch: list[int] = Field(
        default_factory=list, description="speculative: guesses per node, by depth; one number: along the chain"
    )
    measured: list[Measured] = Field(default_factory=list)
    draft_cost: float | None = Field(default=None, description="c: draft step over target step, measured at export")
    predicted_speedup: float | None = None
    notes: str | None = None


class TokenizerFacts(_Part):
    """Token ids the runtime needs without opening the tokenizer."""

    bos: int | None = None
    eos: list[int] = Field(default_factory=list)
    chat_template: bool = False


class FileEntry(_Part):
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


class GoldenVector(_Part):
    """A prompt and the tokens that this bundle's own plain decoding wrote: another runtime must write the same."""

    prompt: list[int]
    method: str
    tokens: list[int]


class Manifest(_Part):
    """The whole manifest."""

    schema_version: int
    edgespec_version: str
    target: ModelPart
    draft: ModelPart | None = None
    methods: dict[str, MethodPart]
    tokenizer: TokenizerFacts
    parity: dict[str, Any] = Field(default_factory=dict)
    cost: dict[str, Any] = Field(default_factory=dict)
    memory: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)
    golden: list[GoldenVector] = Field(default_factory=list)
    files: dict[InsidePath, FileEntry] = Field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate ``folder/edgespec.json``.

    Raises:
        BundleError: no folder or manifest, unreadable JSON, a newer schema, a path that leaves the folder, a wrong key.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not a folder" if not folder.is_dir() else f"has no {MANIFEST}"
        raise BundleError(f"{folder}: expected a bundle, but it {what}", "make one with `edgespec export MODEL`")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise BundleError(f"{path}: not readable as JSON: {error}", "export the bundle again") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise BundleError(f"{path}: expected an object with an integer schema_version, got {version!r}")
    if version < SCHEMA:
        raise BundleError(
            f"{path}: schema {version} is older than this edgespec, which reads schema {SCHEMA}",
            "export the bundle again with this version",
        )
    if version > SCHEMA:
        raise BundleError(
            f"{path}: schema {version} is newer than this edgespec, which reads up to schema {SCHEMA}",
            "upgrade edgespec, or export the bundle with this version",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise BundleError(f"{path}: {where}: {first['msg']}", "export the bundle again") from error
