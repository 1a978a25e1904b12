"""What config.json says of Gemma 4: which layers are wide, which read the keys and values of others."""

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.proportional import rotations_by_kind
from edgespec.export.architectures.settings import part_of
from edgespec.runtimes.files.manifest import ModelFacts

SUPPORTED = "gemma4 with per-layer embeddings and without experts (E2B, E4B)"
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


class Gemma4Config(Architecture):
    """Reads and checks the configuration.

    Attributes:
        kinds: sliding or full attention, by layer.
        owners: layers with keys and values of their own; those after them read the last ones' of their kind.
        wide: size of a head of full layers.
    """

    def check(self) -> None:
        settings, facts = self.settings, self.facts
        if settings.get("use_bidirectional_attention") == "all":
            settings.refuse("use_bidirectional_attention", "attention to later tokens", "causal attention")
        settings.refuse("enable_moe_block", "a mixture of experts", SUPPORTED)
        settings.refuse("attention_k_eq_v", "one projection for keys and values", SUPPORTED)
        width = settings.get("hidden_size_per_layer_input", 256)
        if not width or settings.get("vocab_size_per_layer_input", facts.vocab) != facts.vocab:
            raise UnsupportedModel(
                f"{settings.file}: expected embeddings of each layer (hidden_size_per_layer_input) of all tokens "
                f"(vocab_size_per_layer_input); supported: {SUPPORTED}"
            )
        settings.values["rope_parameters"] = rotations_by_kind(settings, ROTATIONS)
        self.kinds = self._kinds()
        shared = settings.get("num_kv_shared_layers", 0)
        self.owners = facts.layers - (shared if isinstance(shared, int) and 0 <= shared < facts.layers else 0)
        if set(self.kinds[: self.owners]) != set(self.kinds):
            raise ExportError(
                f"{settings.file}: num_kv_shared_layers: no layer gives keys and values to those that share them"
            )
        self.wide = self._wide()
        dims = [self.dim(layer) for layer in range(self.owners)]
        sizes = {"head_dims": dims, "shared": facts.layers - self.owners,
                 "layer_embedding": settings.integer("hidden_size_per_layer_input", 256)}  # fmt: skip
        self.facts = part_of(ModelFacts, settings.file, dict(facts) | sizes)

    def _kinds(self) -> list[str]:
        """Sliding or full attention of each layer; the last one's is full."""
        kinds = self.layer_types or ["full_attention" if at % 6 == 5 else "sliding_attention"
                                     for at in range(self.facts.layers)]  # fmt: skip
        return [*kinds[:-1], "full_attention"]

    def _wide(self) -> int:
        """Size of a head of full layers: said at once, or layer by layer."""
        every = self.settings.get("per_layer_config")
        if not isinstance(every, dict):
            return self.settings.integer("global_head_dim", 512)
        found = [every.get(str(at), {}) for at, kind in enumerate(self.kinds) if kind == "full_attention"]
        sizes = [own.get("head_dim", self.facts.head_dim) if isinstance(own, dict) else None for own in found]
        size = sizes[0]
        others = {key for own in every.values() if isinstance(own, dict) for key in own} - {"head_dim"}
        if any(other != size for other in sizes) or others or not isinstance(size, int) or size <= 0 or size % 8:
            raise UnsupportedModel(
                f"{self.settings.file}: expected per_layer_config to give all full layers one head_dim, a multiple of 8"
            )
        return size

    def dim(self, layer: int) -> int:
        """Size of a layer's heads."""
        return self.facts.head_dim if self.slides(layer) else self.wide

    def slides(self, layer: int) -> bool:
        return self.kinds[layer] == "sliding_attention"

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        if layer < self.owners:
            return layer
        return max(at for at in range(self.owners) if self.kinds[at] == self.kinds[layer])

    def width(self, weight: str) -> int | None:
        at, module = int(weight.split(".")[2]), weight.split(".")[-2]
        sizes = {"q_proj": self.facts.heads, "k_proj": self.facts.kv_heads, "v_proj": self.facts.kv_heads}
        if module in sizes:
            return sizes[module] * self.dim(at)
        if module in ("per_layer_input_gate", "per_layer_model_projection"):
            return self.facts.layer_embedding
        if module == "per_layer_projection":
            return self.facts.hidden
        doubled = at >= self.owners and self.settings.flag("use_double_wide_mlp")
        return 2 * self.facts.intermediate if doubled and module in ("gate_proj", "up_proj") else None

    def ignores(self, name: str) -> bool:
        shared = ("k_proj", "v_proj", "k_norm", "v_norm")
        return int(name.split(".layers.")[1].split(".")[0]) >= self.owners and name.split(".")[-2] in shared
