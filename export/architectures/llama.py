"""Llama 1 to 3 and what shares their layout; rope scaling of type llama3."""

from edgespec.export.architectures.base import Architecture


class Llama(Architecture):
    model_type = "llama"
