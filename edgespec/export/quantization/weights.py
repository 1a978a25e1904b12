"""Choose how the matrices of a model are stored: format, quantizer, and the LM head's own format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.quantization.k_blocks import KBlocks
from edgespec.export.quantization.k_source import k_form
from edgespec.export.quantization.levels import BLOCKS, Blocks
from edgespec.export.quantization.quantizer import QUANTIZERS, Quantizer
from edgespec.runtimes.files.formats import BLOCK_FORMATS, FILE, FOUR_BITS, MIXED, ExportFormat, Format, listed

DEFAULT_QUANTIZER = "mse"


@dataclass(frozen=True)
class WeightChoice:
    """A valid combination of options."""

    format: ExportFormat  # of every matrix but the head's
    quantizer: Quantizer | None  # of matrices in blocks; None for other formats, which have no choice of levels
    head: Format | None  # format of the LM head and of the embedding tied to it; None = ``format``
    # names of the target's matrices that are int8 in a model of 4 bits (``measuring/mixer.py``)
    fine: frozenset[str] = frozenset()
    asked: Format | None = None  # ``--head-format``; None = not given

    @classmethod
    def of(cls, form: ExportFormat, quantizer: str | None, head: Format | None) -> WeightChoice:
        """Check the options ``--format``, ``--quantizer`` and ``--head-format``.

        Raises:
            ExportError: an unknown quantizer, or options that do not fit together.
        """
        if quantizer is not None and quantizer not in QUANTIZERS:
            refused = QUANTIZERS.refused("quantizer", quantizer)
            raise ExportError(refused.message, refused.hint)
        if form == MIXED:
            if head is not None:
                raise ExportError(
                    f"--head-format {head} and --format {MIXED}: its LM head has 6 bits already",
                    "leave one of them out",
                )
            return cls(form, QUANTIZERS[quantizer or DEFAULT_QUANTIZER], None)
        if form not in BLOCKS:
            for option, value in (("--quantizer", quantizer), ("--head-format", head)):
                if value is not None:
                    raise ExportError(
                        f"{option} {value} was given, but --format {form}: expected {listed(BLOCK_FORMATS)}",
                        f"leave {option} out, or choose --format {listed(BLOCK_FORMATS)}",
                    )
            return cls(form, None, None)
        if head is not None and head not in BLOCKS:
            raise ExportError(f"--head-format {head}: expected {listed(BLOCK_FORMATS)}", "leave --head-format out")
        return cls(form, QUANTIZERS[quantizer or DEFAULT_QUANTIZER], None if head == form else head, asked=head)

    @property
    def drafter_head(self) -> Format | None:
        """Return the format of a drafter's LM head and fusing matrix: as chosen, or int8 in a bundle of 4 bits."""
        return self.asked or ("int8" if self.four else None)

    @property
    def stored(self) -> Format:
        """Name the format as bundles have it."""
        return FILE if self.format == MIXED else self.format

    @property
    def for_drafter(self) -> WeightChoice:
        """Return how a drafter's matrices are stored, whose rows differ from layers'."""
        return replace(self, format="int4") if self.format == MIXED else self

    @property
    def quantizer_name(self) -> str | None:
        """Name the quantizer that chooses levels; None = they are rounded."""
        return self.quantizer.name if self.quantizer else None

    @property
    def four(self) -> bool:
        """Whether matrices have 4 bits."""
        return self.format in (*FOUR_BITS, MIXED)

    def blocks(self, arch: Architecture) -> Callable[[str], Blocks | KBlocks]:
        """Make a function from a matrix's name to its block format."""

        def blocks(name: str) -> Blocks | KBlocks:
            if self.format == MIXED:
                return k_form(arch, name)
            if name in self.fine:
                return BLOCKS["int8"]
            return BLOCKS[self.head if self.head and name == arch.head.weight else self.stored]

        return blocks
