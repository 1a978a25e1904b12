"""Llama 1 to 3 and what shares their layout."""

from edgespec.export.architectures.base import Architecture


class Llama(Architecture):
    model_type = "llama"
    example = "Llama-3.2-1B-Instruct, SmolLM2"
    features = "grouped heads, biases, any head size"
