"""Opening the models of a bundle, and slots over them: on the CPU with the chosen operators, or on a device."""

from __future__ import annotations

from edgespec.runtimes.devices.driver_check import open_on_device
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.devices.slot import DeviceSlot
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.kv import KvFormat
from edgespec.runtimes.files.operators import OperatorChoice, choose_operators
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.cpu import cpu_slot
from edgespec.runtimes.slots.shared import Model, no_adapters
from edgespec.runtimes.slots.slot import Slot

ONE_THREAD_BYTES = 4 << 20  # of a draft's weights


def open_target(
    bundle: Bundle,
    options: LoadOptions,
    device: DeviceName,
    graph: str,
    strict: bool,
    threads: int | None,
    kv: KvFormat | None,
    expert_cache: int | None = None,
) -> Model:
    """Open the target of ``bundle``: one of its graphs on the CPU, all on a device; raises the errors of ``load``."""
    adapters = options.adapter_folders
    if device != "cpu":
        if adapters:
            raise no_adapters()
        return open_on_device(bundle, device, options.device_precision, strict, threads)
    return Model(bundle.path, bundle.manifest.target, graph, threads, kv, bundle.checked, expert_cache, adapters)


def share_target(model: Model, strict: bool) -> Model:
    """Return the target ``model`` for another engine; its sessions are shared."""
    return model.relaxed() if isinstance(model, DeviceModel) and model.strict and not strict else model


def open_draft(bundle: Bundle, name: str, options: LoadOptions, operators: OperatorChoice) -> Model:
    """Open the ``draft`` or the ``drafter``, options and operators the target's; on the CPU if the device has none."""
    part = bundle.part(name)
    if any(graph.device == options.device != "cpu" for graph in part.graphs.values()):
        return DeviceModel(bundle.path, part, options.device, False, options.device_precision, bundle.checked)
    # a small draft is done before a second thread has woken up
    small = bundle.manifest.files[part.weights].size < ONE_THREAD_BYTES
    # the target's operators, except that a foreign graph has only stock ones
    if part.foreign or bundle.manifest.target.foreign:
        operators = choose_operators("stock" if options.operators == "stock" else "auto", part)
    threads = 1 if small else options.threads
    return Model(bundle.path, part, operators.graph(part, False), threads, checked=bundle.checked)


def open_slot(model: Model, *, context: int | None = None, reserve: int = 256) -> Slot:
    """Open a slot over ``model``.

    Args:
        model: the session and shared buffers.
        context: maximum tokens of the sequence; at most the limit of the export.
        reserve: tokens to allocate at once; the buffers grow when more are needed.
    """
    if isinstance(model, DeviceModel):
        return DeviceSlot(model, context=context, reserve=reserve)
    return cpu_slot(model, context=context, reserve=reserve)
