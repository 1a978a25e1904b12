"""Facts of a model for decoding and planning: its sizes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from edgespec.runtimes.files.bounds import MOST_WIDTH, Context, Count, Layer, Rotary, Vocab, Width


class Part(BaseModel):
    """Common settings: unknown keys are errors, so that a typo in a manifest cannot pass silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ExpertFacts(Part):
    """Mixtures of experts: each row goes to ``chosen`` of ``count`` MLPs of width ``inner``, in some layers.

    ``always`` of both get every row.
    """

    count: Width
    chosen: Width
    inner: Width
    layers: list[Layer]
    always: int = Field(default=0, ge=0, le=MOST_WIDTH)

    def distinct(self, rows: float) -> float:
        """Estimate the number of experts that a pass over n rows reads, if rows choose independently and uniformly."""
        others = self.count - self.always
        share = min((self.chosen - self.always) / others, 1.0) if others > 0 else 1.0
        return float(self.always + others * (1 - (1 - share) ** rows))


class DeltaHeads(Part):
    """The heads of gated delta rules: ``values`` states [key_dim, value_dim] a layer, on ``keys`` queries and keys.

    ``space``: they are state spaces (Mamba-2), on as many groups.
    """

    keys: Width
    values: Width
    key_dim: Width
    value_dim: Width
    space: bool = False

    @property
    def kind(self) -> str:
        """Human-readable kind."""
        return "state spaces" if self.space else "gated delta rules"

    @property
    def mixed(self) -> int:
        """Width of the concatenated queries, keys and values of a token."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


class ModelFacts(Part):
    """Facts of a model for decoding and planning; sizes in elements."""

    architecture: str
    layers: Layer = Field(gt=0)
    hidden: Width
    intermediate: Width
    heads: Width
    kv_heads: Width
    head_dim: Width
    vocab: Vocab
    context: Context = Field(description="maximum tokens of one sequence")
    rope: Rotary = Field(default_factory=dict)
    tied: bool = False
    parameters: Count = 0
    convolutions: list[Layer] = Field(default_factory=list, description="layers with a short one instead of attention")
    taps: int = Field(default=0, ge=0, le=16, description="tokens that each of those sees")
    delta: DeltaHeads | None = Field(default=None, description="gated delta rules after those convolutions")
    head_dims: list[Width] = Field(default_factory=list, description="of layers with keys and values, if they differ")
    shared: int = Field(default=0, ge=0, description="last layers, which read keys and values of earlier ones")
    layer_embedding: int = Field(default=0, ge=0, le=MOST_WIDTH, description="width of an embedding of a layer's own")
    experts: ExpertFacts | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values of one token."""
        return 2 * self.kv_heads * sum(self.dims) * 4

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - len(self.convolutions) - self.shared

    @property
    def dims(self) -> list[int]:
        """Size of a head of each layer with keys and values."""
        return self.head_dims or [self.head_dim] * self.kv_layers
