"""Convert decoders of codes from a checkpoint to a graph of a bundle."""

from edgespec.export.codes.graph import CodeTensors as CodeTensors
from edgespec.export.codes.write import ended as ended
from edgespec.export.codes.write import read_codes as read_codes
from edgespec.export.codes.write import write_codes as write_codes
