"""How the levels and scales of int4 and int8 weights are chosen."""

from __future__ import annotations

from edgespec.export.quantizers.awq import ActivationAware
from edgespec.export.quantizers.base import DirectLevels, LevelSource, Quantizer
from edgespec.export.quantizers.gptq import Gptq
from edgespec.export.quantizers.mse import SquaredError
from edgespec.export.quantizers.rtn import RoundToNearest

__all__ = ["QUANTIZERS", "DirectLevels", "LevelSource", "Quantizer"]

QUANTIZERS: dict[str, Quantizer] = {
    quantizer.name: quantizer for quantizer in (RoundToNearest(), SquaredError(), ActivationAware(), Gptq())
}
