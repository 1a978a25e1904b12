"""Seed-OSS: Llama with biases on q, k and v."""

from edgespec.export.architectures.base import Architecture


class SeedOss(Architecture):
    model_type = "seed_oss"
    example = "Seed-OSS-36B-Instruct"
    features = "biases on q, k, v"

    def bias(self, module: str) -> bool:
        if module == "self_attn.o_proj":
            return self.settings.flag("attention_out_bias")
        return self.settings.flag("attention_bias", True) if module.startswith("self_attn") else super().bias(module)
