"""Register a backend of ``transformers.exporters`` that makes bundles of models.

    import edgespec.exporter
    from transformers.exporters import AutoHfExporter, ExportedModel

    config = {"export_format": "edgespec", "options": {"format": "int4"}}
    exported = AutoHfExporter.from_config(config).export(model, inputs, config)
    exported.save_pretrained("exported")
    ExportedModel.from_pretrained("exported")(input_ids=ids).logits

Importing this module registers it.  ``exported.program`` is the bundle's folder, for ``edgespec.load``.
Needs transformers 5.23 or newer (the extra ``transformers``).
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import edgespec
from edgespec.errors import BundleError, ExportError, InvalidRequest, first_line, install_hint, unknown_name
from edgespec.export.options import ExportOptions

try:
    import torch
    from transformers import AutoTokenizer
    from transformers.exporters import ExportConfigMixin, ExportedComponent, ExportedModel, HfExporter, ModelRunner
    from transformers.exporters import register_backend as _register
    from transformers.exporters.metadata import ExportMetadata

    from edgespec.transformers import EdgespecForCausalLM
except ImportError as error:
    raise ImportError(f"edgespec.exporter: {error}; {install_hint('transformers')}") from error

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

NAME = "edgespec"
_MOST_BYTES = 1 << 40  # of an unpacked bundle


@dataclass
class EdgespecExportConfig(ExportConfigMixin):  # type: ignore[misc] # transformers is not checked
    """How a model is exported.

    Attributes:
        export_format: ``edgespec``.
        tokenizer: folder or hub id of the tokenizer; None = the model's own (``name_or_path``).
        options: keyword arguments of ``edgespec.export``, such as ``format``, ``methods`` and ``draft``.
    """

    export_format: str = NAME
    tokenizer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    quantizer: ClassVar[None] = None  # edgespec has its own


class EdgespecExporter(HfExporter):  # type: ignore[misc]
    """Exports a causal model of transformers, in float32, into a bundle."""

    export_format = NAME
    config_class = EdgespecExportConfig
    program_suffix = ".edgespec"
    required_packages: ClassVar[list[str]] = []

    def export_program(
        self, model: PreTrainedModel, sample_inputs: Mapping[str, Any], config: EdgespecExportConfig
    ) -> tuple[Path, ExportMetadata]:
        """Export a model.

        Args:
            model: a causal model, as ``AutoModelForCausalLM`` loads it.
            sample_inputs: ignored: a bundle takes texts of any length.
            config: see there.

        Returns:
            the bundle's folder, which lasts until the process ends, and what transformers records of it.

        Raises:
            EdgespecError: see ``edgespec.export``.
        """
        _check_options(config.options)
        name = config.tokenizer or getattr(model.config, "name_or_path", "")
        if not name:
            raise ExportError("the model has no name_or_path", "give the tokenizer's folder: tokenizer=...")
        work = _scratch()
        source, bundle = work / "model", work / "bundle"
        try:
            AutoTokenizer.from_pretrained(name).save_pretrained(source)
        except (OSError, ValueError) as error:
            raise ExportError(f"{name}: no tokenizer: {first_line(error)}", "say which: tokenizer=...") from error
        model.save_pretrained(source)
        edgespec.export(source, bundle, **config.options)
        ids = {"rank": 2, "shape": [1, 1], "dtype": "int64"}
        metadata = ExportMetadata(
            architecture=type(model).__name__,
            packages={"edgespec": edgespec.__version__},
            export_dtype="float32",
            export_device="cpu",
            kwargs={"input_ids": ids, "attention_mask": dict(ids)},
        )
        return bundle, metadata

    def export_for_generation(
        self,
        model: PreTrainedModel,
        sample_inputs: Mapping[str, Any],
        config: EdgespecExportConfig | dict[str, Any],
        *,
        generation_config: Any = None,
        multi_token_decode: bool = True,
    ) -> ExportedModel:
        """Export a model as ``export`` does: one bundle reads prompts and decodes.

        Args:
            model, sample_inputs, config: as there.
            generation_config: saved next to the bundle.
            multi_token_decode: ignored: passes always take several tokens.
        """
        component: ExportedComponent = self._export_component(model, sample_inputs, config)
        return ExportedModel({"model": component}, NAME, config=model.config, generation_config=generation_config)

    @classmethod
    def save_program(cls, program: Path, path: str | os.PathLike[str]) -> None:
        """Write a bundle as one uncompressed zip file."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
            for one in sorted(Path(program).rglob("*")):
                if one.is_file():
                    file.write(one, one.relative_to(program).as_posix())

    @classmethod
    def load_program(cls, path: str | os.PathLike[str]) -> Path:
        """Unpack what ``save_program`` wrote -> the bundle's folder, which lasts until the process ends.

        Raises:
            BundleError: it is no such file.
        """
        bundle = _scratch() / "bundle"
        try:
            with zipfile.ZipFile(path) as file:
                if sum(one.file_size for one in file.infolist()) > _MOST_BYTES:
                    raise BundleError(f"{path}: unpacked, it has more than {_MOST_BYTES} bytes")
                file.extractall(bundle)
        except (OSError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path}: not a saved bundle: {first_line(error)}", "save the export again") from error
        return bundle


class EdgespecRunner(ModelRunner):  # type: ignore[misc]
    """Computes logits by a bundle."""

    def __init__(self, program: Path, metadata: ExportMetadata, **options: Any) -> None:
        self.metadata = metadata
        self.model = EdgespecForCausalLM.from_pretrained(program, **options)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @classmethod
    def from_program(
        cls, program: Path, metadata: ExportMetadata, device: Any = None, threads: int | None = None
    ) -> EdgespecRunner:
        """Load a bundle.

        Args:
            program: its folder.
            metadata: of the export.
            device: None or the CPU.
            threads: see ``LoadOptions``.

        Raises:
            InvalidRequest: another device.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise InvalidRequest(f"device {device}: exports of edgespec run on the CPU", "leave the device out")
        return cls(program, metadata, threads=threads)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **inputs: Any) -> CausalLMOutput:
        """Compute logits; see ``EdgespecForCausalLM``."""
        return self.model(**inputs)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _scratch() -> Path:
    _folders.append(tempfile.TemporaryDirectory(prefix="edgespec-"))
    return Path(_folders[-1].name)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that ``edgespec.export`` does not have."""
    known = set(ExportOptions.__dataclass_fields__) - {"model", "output"}
    if unknown := sorted(set(options) - known):
        raise unknown_name("option", unknown[0], sorted(known))
    try:
        json.dumps(options, default=str)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"options: {first_line(error)}: expected values that JSON has") from error


_register(EdgespecExporter, EdgespecRunner)
