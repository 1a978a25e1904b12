"""Ministral 3, the text part: Mistral whose queries grow beyond the length it was first trained on."""

from edgespec.export.architectures.mistral import Mistral


class Ministral3(Mistral):
    model_type = "ministral3"
    example = "Ministral-3-3B-Instruct-2512"
    features = "queries that grow beyond the first trained length, YaRN; text part of those with images"
    epsilon = ("rms_norm_eps", 1e-5)
