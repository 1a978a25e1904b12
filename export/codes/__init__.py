"""Decoders of codes: from the checkpoint of one to the graph of a bundle."""

from edgespec.export.codes.write import ended as ended
from edgespec.export.codes.write import write_codes as write_codes
