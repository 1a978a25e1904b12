"""Measure the speed of native matrices on a phone or an Arm board, and check that it computes the same bits.

    python -m benchmarks.device                              # the phone that adb knows (--serial, of several)
    python -m benchmarks.device --ssh pi@board               # a 64-bit Arm Linux that ssh knows
    python -m benchmarks.device --here                       # this machine
    python -m benchmarks.device --command qemu-aarch64       # an emulator: what it computes, not how fast

One static program is built from the product's own sources on this machine, copied there, run and removed: the device
needs neither Python nor ONNX Runtime.  ANDROID_NDK, where it is set, names the NDK whose compiler is used; otherwise it
is aarch64-linux-gnu-g++, whose static programs also run in Android's shell.

For each instruction set of the processor it prints whether every kernel's hash is that of plain C++ on this machine,
and whether whole passes are right with several threads.  Interleaved measurements follow: memory bandwidth, byte
products per second, passes over the matrices of some layers, and attention of the same number of layers after a long
text.  100 % is the least time that both rooflines allow; more means that memory was faster in a pass than in the
separate read.  "From the caches" is the same pass over weights that stay in the second cache: faster memory would not
make it faster.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.linear import SHAPES
from benchmarks.shapes import SHAPES as CONFIGS
from edgespec.errors import DeviceError, EdgespecError
from edgespec.runtimes.files.formats import GGML, SPECS
from tests.support.selftest import ARM, COMMON, PLAIN, build, host_compiler, host_isas, knows

MOST = 128  # rows of a pass; threads
# by what the program calls their matrices
FORMATS = (
    {spec.kind: spec.name for spec in SPECS.values() if spec.size}
    | {name: name.upper() for name in GGML}
    | {
        "q8": "int8, one plane",
        "p8 high": "int8, high plane",
    }
)
_KEYS = {"f16": "float16", "int8": "int8"}  # and keys and values


@dataclass(frozen=True)
class Machine:
    """Where the program runs.

    Attributes:
        start: words before a command there.
        copy: words before the file here and its name there; none: it runs where it is.
        place: its name there, without ``host``.
        host: what ``copy`` wants before ``place``.
    """

    start: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()
    place: str = ""
    host: str = field(default="", kw_only=True)

    def begin(self, program: Path) -> Machine:
        """Copy the program; give where it is."""
        if not self.copy:
            return Machine(self.start, place=str(program))
        _run([*self.copy, str(program), self.host + self.place])
        _run([*self.start, f"chmod 755 {self.place}"])
        return self

    def run(self, *arguments: str) -> str:
        """Give what the program prints."""
        return _run([*self.start, self.place, *arguments])

    def end(self) -> None:
        """Remove the copy."""
        if self.copy:
            _run([*self.start, f"rm -f {self.place}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--serial", help="the phone among several (adb devices)")
    where.add_argument("--ssh", metavar="HOST")
    where.add_argument("--command", help="what runs programs for 64-bit Arm on this machine")
    where.add_argument("--here", action="store_true")
    parser.add_argument("--compiler", help="a C++ compiler for the device")
    parser.add_argument("--folder", type=Path, help="keeps what is built; what it has already is taken as it is")
    parser.add_argument("--shape", default="llama-3.2-1b", type=_shape, help=f"{', '.join(SHAPES)}, or NxK,NxK,...")
    parser.add_argument(
        "--layers", type=_positive, default=4, help="of that shape in a pass: more bytes than caches hold"
    )
    parser.add_argument("--depth", type=_depth, default=2048, help="tokens that attention reads; 0: leave it out")
    parser.add_argument("--heads", type=_heads, metavar="HEADSxKVxDIM", help="of attention, else the shape's own")
    parser.add_argument("--threads", type=_numbers, default="1,2,4")
    parser.add_argument("--rows", type=_numbers, default="1,2,4,8,16,32")
    parser.add_argument("--turns", type=_positive, default=15)
    parser.add_argument("--megabytes", type=_positive, default=256, help="that a measurement of the bandwidth reads")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = _measured(arguments, arguments.folder or Path(folder))
    except EdgespecError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(found, indent=1) if arguments.json else _table(found))


def _positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to 99999")
    return int(text)


def _depth(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _heads(text: str) -> str:
    """Heads, KV heads and their size."""
    sizes = [_positive(part) for part in text.split("x")]
    if len(sizes) != 3 or sizes[0] % sizes[1] or sizes[2] % 2 or sizes[2] > 256:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected HEADSxKVxDIM, such as 32x8x64, heads a multiple of KV heads, an even size up to 256"
        )
    return text


def _heads_of(shape: str) -> str:
    """Those of the shape that has these matrices, or of a 1B model."""
    name = next((name for name in SHAPES if _shape(name) == shape), "llama-3.2-1b")
    config = CONFIGS[name]
    heads = config["num_attention_heads"]
    return f"{heads}x{config['num_key_value_heads']}x{config.get('head_dim', config['hidden_size'] // heads)}"


def _numbers(text: str) -> str:
    if any(_positive(part) > MOST for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers up to {MOST}")
    return text


def _shape(text: str) -> str:
    """[n, k] of the matrices of a layer, as the program reads them."""
    if text in SHAPES:
        return ",".join(f"{n}x{k}" for n, k in SHAPES[text])
    if not re.fullmatch("([1-9][0-9]{0,5}x[1-9][0-9]{0,5},?)+(?<!,)", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {', '.join(SHAPES)}, or NxK,NxK,...")
    return text


def _measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    machine = _machine(arguments)
    if machine.copy:
        _run([*machine.start, "true"])  # before minutes are spent on building
    program, plain = _programs(arguments, folder)
    machine = machine.begin(program)
    try:
        expected = _run([str(plain), "hash", "scalar"])
        isas = machine.run("isas").split()
        found: dict[str, Any] = {
            "processor": machine.run("processor").strip(),
            "shape": arguments.shape,
            "layers": arguments.layers,
        }
        found["isas"] = {isa: {"other_bits": _others(expected, machine.run("hash", isa))} for isa in isas}
        found["passes"] = machine.run("pass", "brief").strip()
        for isa in isas if isas == ["scalar"] else isas[1:]:
            found["isas"][isa]["threads"] = {}
            for threads in arguments.threads.split(","):
                _say(f"{isa}, {threads} threads")
                numbers = (
                    threads,
                    arguments.turns,
                    arguments.layers,
                    arguments.megabytes,
                    arguments.rows,
                    arguments.shape,
                )
                one = json.loads(machine.run("speed", isa, *map(str, numbers)))
                found["isas"][isa]["threads"][threads] = _shares(one)
                if depth := arguments.depth:
                    heads = arguments.heads or _heads_of(arguments.shape)
                    one = json.loads(machine.run("attention", isa, *map(str, (*numbers[:-1], depth, heads))))
                    found["isas"][isa]["threads"][threads]["attention"] = _of_memory(one, depth, heads)
    finally:
        machine.end()
    return found


def _others(expected: str, found: str) -> list[str]:
    """Kernels and sizes whose bits differ."""
    both = zip(expected.splitlines(), found.splitlines(), strict=True)
    return [ours.split()[0] for ours, theirs in both if ours != theirs]


def _shares(one: dict[str, Any]) -> dict[str, Any]:
    """Return the measured times, with the limits of both rooflines."""
    found: dict[str, Any] = {"read_gb_s": round(one["read_gb_s"], 2), "dots_gmac_s": round(one["dots_gmac_s"], 1)}
    for name, form in one["formats"].items():
        reads, products = form["bytes"] / one["read_gb_s"] / 1e6, form["products"] / one["dots_gmac_s"] / 1e6  # ms
        least = {row: max(reads, products * int(row)) for row in form["ms"]}
        found[FORMATS[name]] = _cells(form, least, "share_of_roofs")
    return found


def _of_memory(one: dict[str, Any], depth: int, heads: str) -> dict[str, Any]:
    """Return the time of attention, with the limit of the bandwidth."""
    found: dict[str, Any] = {"depth": depth, "heads": heads, "read_gb_s": round(one["read_gb_s"], 2)}
    for name, form in one["formats"].items():
        reads = form["bytes"] / one["read_gb_s"] / 1e6  # ms
        found[_KEYS[name]] = _cells(form, dict.fromkeys(form["ms"], reads), "share_of_memory")
    return found


def _cells(form: dict[str, Any], least: dict[str, float], share: str) -> dict[str, Any]:
    """Figures of a format by rows; ``least`` milliseconds are 100 % of what is called ``share``."""
    first, rows = next(iter(form["ms"].values())), {}
    for row, ms in form["ms"].items():
        rows[row] = {"ms": round(ms, 6), "gmac_s": round(form["products"] * int(row) / ms / 1e6, 2),
                     "v": round(ms / first, 2), share: round(least[row] / ms, 3)}  # fmt: skip
        if held := form.get("held_ms"):
            rows[row] |= {"held_ms": round(held[row], 6), "least_v": round(held[row] / first, 2)}
    return {"mb": round(form["bytes"] / 1e6, 1), "rows": rows}


def _table(found: dict[str, Any]) -> str:
    lines = [f"processor: {found['processor']}", f"passes of {found['layers']} layers of {found['shape']}",
             f"whole passes: {found['passes']}"]  # fmt: skip
    for isa, about in found["isas"].items():
        lines += [
            "",
            f"{isa}: {'OTHER BITS in ' + ', '.join(others) if (others := about['other_bits']) else 'the same bits'}",
        ]
        for threads, one in about.get("threads", {}).items():
            lines.append(f"  {threads} threads: memory {one['read_gb_s']} GB/s, products {one['dots_gmac_s']} GMAC/s")
            for weights in [name for name in FORMATS.values() if name in one]:
                lines += _lines(weights, one[weights], "share_of_roofs", "of the roofs")
            if about := one.get("attention"):
                where = f"{about['heads']}, depth {about['depth']}"
                for form in _KEYS.values():
                    lines += _lines(f"attention, {form}, {where}", about[form], "share_of_memory", "of the memory")
    return "\n".join(lines)


def _lines(name: str, form: dict[str, Any], share: str, heading: str) -> list[str]:
    held = any("held_ms" in cell for cell in form["rows"].values())
    more = "  from the caches  least v" if held else ""
    lines = [f"    {name}, {form['mb']} MB      ms  GMAC/s  v(rows)  {heading}{more}"]
    for row, cell in form["rows"].items():
        line = f"    {row:>4} rows {cell['ms']:11.2f} {cell['gmac_s']:7.1f} {cell['v']:8.2f} {cell[share]:12.0%}"
        lines.append(f"{line} {cell['held_ms']:16.2f} {cell['least_v']:8.2f}" if held else line)
    return lines


def _machine(arguments: argparse.Namespace) -> Machine:
    """Reach the machine that was asked for.

    Raises:
        DeviceError: what reaches it is not installed.
    """
    if arguments.here:
        return Machine()
    if arguments.command:
        return Machine((_needed(shlex.split(arguments.command)[0], "install it"), *shlex.split(arguments.command)[1:]))
    if arguments.ssh:
        ssh, scp = (_needed(name, "install OpenSSH's client") for name in ("ssh", "scp"))
        return Machine((ssh, arguments.ssh), (scp, "-q"), "/tmp/edgespec-selftest", host=f"{arguments.ssh}:")
    words = (_needed("adb", "install Android's platform tools, or use --ssh, --command or --here"),)
    words += ("-s", arguments.serial) if arguments.serial else ()
    return Machine((*words, "shell"), (*words, "push"), "/data/local/tmp/edgespec-selftest")


def _programs(arguments: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Give the device's program, and plain C++ for this machine."""
    device, plain = folder / "device" / "selftest", folder / "plain" / "selftest"
    if not (device.exists() and plain.exists()):
        here = host_compiler()
        if here is None:
            raise DeviceError("no C++ compiler for this machine", "install one (c++), or name it in CXX")
        compiler = arguments.compiler or (here if arguments.here else _cross_compiler())
        _say(f"building with {compiler}: a minute or two")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            isas = host_isas() if arguments.here else tuple(isa for isa in ARM if knows(compiler, isa))
            build(device.parent, compiler, isas, COMMON if arguments.here else (*COMMON, "-static"))
            build(plain.parent, here, (), PLAIN)
        except (AssertionError, OSError) as error:  # what the compiler says, or that there is none
            raise DeviceError(str(error).strip()[:1000], f"expected C++17 of {compiler} and of {here}") from None
    return device, plain


def _cross_compiler() -> str:
    """Find the compiler for the device.

    Raises:
        DeviceError: none is installed.
    """
    if ndk := os.environ.get("ANDROID_NDK"):
        name = "aarch64-linux-android26-clang++"
        found = sorted(Path(ndk).glob(f"toolchains/llvm/prebuilt/*/bin/{name}"))
        if not found:
            raise DeviceError(
                f"ANDROID_NDK={ndk}: expected {name} in toolchains/llvm/prebuilt/*/bin", "use r27 or later"
            )
        return str(found[0])
    return _needed("aarch64-linux-gnu-g++", "install g++-aarch64-linux-gnu, or set ANDROID_NDK, or use --compiler")


def _needed(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise DeviceError(f"{name} is not installed", what)
    return found


def _run(command: Sequence[str]) -> str:
    """Run a command -> what it printed.

    Raises:
        DeviceError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise DeviceError(f"{shlex.join(command)} ended with {done.returncode}: {said}", "see what it says")
    return done.stdout


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
