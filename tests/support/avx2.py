"""ONNX Runtime's kernels for x86 processors without AVX-512, at full speed on a processor that has it.

python -m tests.support.avx2 ENVIRONMENT changes the copy of ONNX Runtime that is installed in a virtual environment:
what reads the registers that the system saves (XGETBV) finds those of AVX and no more. Then a pass of one row must
have other bits than the row has among others, as only the kernels for AVX2 give them. Run the tests in that
environment with the variables that this program prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__ as parts  # type: ignore[import-not-found]  # no stub
from numpy._core._multiarray_umath import __cpu_features__ as features

XGETBV = re.compile(rb"(?<!\x83[\xc0-\xff])(?<!\xc1[\xc0-\xff])\x0f\x01\xd0")
"""Not within `and`, `ror` and the like of a register by 15, followed by `add eax, edx`."""
AVX = b"\x6a\x07\x58"  # push 7, pop rax: x87, SSE and AVX
PLACES = 4
"""How many a library has. Another number in another version is to be looked at: what only looks like it must stay."""


def change(package: Path) -> None:
    """Replace the libraries of an installed ONNX Runtime; files that are linked elsewhere stay unchanged there."""
    files = [file for file in package.glob("capi/*onnxruntime*.so*") if "providers" not in file.name]
    if not files:
        raise SystemExit(f"no ONNX Runtime in {package}")
    for file in files:
        whole, count = XGETBV.subn(AVX, file.read_bytes())
        if count != PLACES:
            raise SystemExit(f"{file.name} has {count} places that look like XGETBV, not {PLACES}: disassemble them")
        new = file.with_suffix(".new")
        new.write_bytes(whole)
        new.chmod(file.stat().st_mode)
        new.replace(file)


def differs() -> bool:
    """Whether a lone row of MatMulNBits has other bits than it has among others."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    inner, outer, block = 256, 64, 32
    random = np.random.default_rng(1)
    weights = random.integers(0, 256, (outer, inner // block, block // 2), np.uint8)
    scales = random.uniform(0.01, 0.1, outer * inner // block).astype(np.float32)
    node = helper.make_node(
        "MatMulNBits", ["x", "weights", "scales"], ["y"], domain="com.microsoft",
        K=inner, N=outer, bits=4, block_size=block, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "row",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outer])],
        [onnx.numpy_helper.from_array(weights, "weights"), onnx.numpy_helper.from_array(scales, "scales")],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random.standard_normal((8, inner)).astype(np.float32)
    (together,) = session.run(None, {"x": x})
    alone = np.concatenate([session.run(None, {"x": row[None]})[0] for row in x])
    return not np.array_equal(alone, together)


def main(environment: Path) -> None:
    """Change the environment's ONNX Runtime, see that it took, and print the variables for the rest."""
    (package,) = environment.glob("lib/python*/site-packages/onnxruntime")
    change(package)
    python = environment / "bin" / "python"
    code = "from tests.support.avx2 import differs; raise SystemExit(not differs())"
    if subprocess.run([python, "-c", code], env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"}).returncode:
        raise SystemExit("a lone row has the bits that it has among others: these are not the kernels for AVX2")
    beyond = [name for name in parts if features[name] and name.startswith(("AVX512", "X86_V4"))]
    sys.stdout.write(f"EDGESPEC_ISA=avx2 OPENBLAS_CORETYPE=Haswell 'NPY_DISABLE_CPU_FEATURES={' '.join(beyond)}'\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
