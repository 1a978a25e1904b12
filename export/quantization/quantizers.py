"""How the levels and scales of int4 and int8 weights are chosen."""

from __future__ import annotations

from edgespec.export.quantization.awq import ActivationAware
from edgespec.export.quantization.base import DirectLevels, LevelSource, Quantizer
from edgespec.export.quantization.gptq import Gptq
from edgespec.export.quantization.mse import SquaredError
from edgespec.export.quantization.rtn import RoundToNearest

__all__ = ["QUANTIZERS", "DirectLevels", "LevelSource", "Quantizer"]

QUANTIZERS: dict[str, Quantizer] = {
    quantizer.name: quantizer for quantizer in (RoundToNearest(), SquaredError(), ActivationAware(), Gptq())
}
