"""The declarations of the crate edgespec-sys against edgespec.h, which a C compiler compares."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CRATE, HEADER = (
    ROOT / "rust" / "edgespec-sys" / "src" / "lib.rs",
    ROOT / "edgespec" / "runtimes" / "native" / "edgespec.h",
)
TYPES = {"c_char": "char", "c_int": "int", "c_double": "double", "c_void": "void", "f32": "float", "u8": "uint8_t",
         "i32": "int32_t", "u32": "uint32_t", "i64": "int64_t", "u64": "uint64_t", "usize": "size_t"}  # fmt: skip


def c_name(name: str) -> str:
    return "edgespec" + re.sub("([A-Z])", r"_\1", name).lower()


def c_type(rust: str) -> str:
    """Return a type of the crate as C writes it; functions are aliases of the crate."""
    rust = rust.strip()
    if pointed := re.fullmatch(r"\*(const|mut) (.*)", rust, re.DOTALL):
        return c_type(pointed[2]) + (" const*" if pointed[1] == "const" else "*")
    if function := re.fullmatch(r"Option<(\w+)>", rust):
        return f"{function[1]}_function"
    return TYPES.get(rust) or c_name(rust)


def c_parameters(given: str) -> str:
    found = [c_type(one.split(":", 1)[1]) for one in given.split(",") if one.strip()]
    return ", ".join(found) or "void"


def c_of(crate: str) -> str:
    """Write a C program that compiles where the crate declares what the header does."""
    lines = ['#include "edgespec.h"', "#define SAME(a, b) _Static_assert(a == b, #a)"]
    version = re.search(r"pub const C_VERSION: u32 = (\d+);", crate)
    assert version is not None
    lines.append(f"SAME(EDGESPEC_C_VERSION, {version[1]});")
    constants = re.findall(r"pub const (\w+): (?:c_int|i32) = (\d+);", crate)
    lines += [f"SAME(EDGESPEC_{name}, {value});" for name, value in constants]
    functions = re.findall(r'pub type (\w+) =\s*unsafe extern "C" fn\((.*?)\)(?: -> ([^;]*))?;', crate, re.DOTALL)
    for name, parameters, result in functions:
        lines.append(f"typedef {c_type(result) if result else 'void'} (*{name}_function)({c_parameters(parameters)});")
    structures = re.findall(r"pub struct (\w+) \{\n(    pub .*?)\n\}", crate, re.DOTALL)
    for name, body in structures:
        fields = re.findall(r"pub (\w+): (.*),", body)
        inside = " ".join(f"{c_type(of)} {field};" for field, of in fields)
        lines.append(f"struct {name} {{ {inside} }};")
        lines.append(f"SAME(sizeof({c_name(name)}), sizeof(struct {name}));")
        for field, _ in fields:
            kind = f"__typeof__((({c_name(name)}*)0)->{field}), __typeof__(((struct {name}*)0)->{field})"
            lines.append(f"SAME(offsetof({c_name(name)}, {field}), offsetof(struct {name}, {field}));")
            lines.append(f'_Static_assert(__builtin_types_compatible_p({kind}), "{name}.{field}");')
    for name, parameters, result in re.findall(r"pub fn (edgespec_\w+)\((.*?)\)(?: -> ([^;]*))?;", crate, re.DOTALL):
        lines.append(f"{c_type(result) if result else 'void'} {name}({c_parameters(parameters)});")
    assert (len(constants) > 10, len(functions) > 5, len(structures) > 8) == (True, True, True)
    return "\n".join(lines) + "\n"


def compiles(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if not compiler:
        pytest.skip("no C compiler to compare the declarations")
    (folder / "same.c").write_text(program)
    command = [compiler, "-std=gnu11", "-fsyntax-only", f"-I{HEADER.parent}", str(folder / "same.c")]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_crate_declares_what_the_header_does(tmp_path: Path) -> None:
    done = compiles(c_of(CRATE.read_text("utf-8")), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_crate_declares_all_of_sessions() -> None:
    header, crate = HEADER.read_text("utf-8"), CRATE.read_text("utf-8")
    sessions = header[header.index("---- sessions") :]
    functions = set(re.findall(r"EDGESPEC_API [^;(]*?(edgespec_\w+)\(", sessions))
    assert len(functions) > 20
    assert functions <= set(re.findall(r"pub fn (edgespec_\w+)", crate))
    structures = set(re.findall(r"typedef struct (edgespec_\w+) \{", sessions))
    assert len(structures) > 8
    assert structures <= set(map(c_name, re.findall(r"pub struct (\w+)", crate)))
    errors = re.findall(r"^  EDGESPEC_(\w+) = ", header[: header.index("EDGESPEC_ATTENTION_EXACT")], re.MULTILINE)
    ends = re.findall(r"^  EDGESPEC_(\w+) = ", sessions, re.MULTILINE)
    assert {*errors, *ends} <= set(re.findall(r"pub const (\w+)", crate))


@pytest.mark.parametrize(
    ("declared", "wrong"),
    [
        ("C_VERSION: u32 = ", "C_VERSION: u32 = 1"),
        ("HOST_FAILED: c_int = 7", "HOST_FAILED: c_int = 6"),
        ("    pub adapter: i32,\n    pub reserved: i32,\n", ""),  # a field that the crate lacks
        ("pub cycles: i32", "pub cycles: i64"),
        (
            "    pub tokens: *const i64,\n    pub drafted: *const i64,\n",
            "    pub drafted: *const i64,\n    pub tokens: *const i64,\n",
        ),
        ("    pub logits: *mut f32", "    pub logits: *const f32"),
        ("cache: u64", "cache: u32"),
        ("    user: *mut c_void,\n    text: *const c_char", "    text: *const c_char"),  # of a function of a codec
    ],
)
def test_another_declaration_is_found(declared: str, wrong: str, tmp_path: Path) -> None:
    crate = CRATE.read_text("utf-8")
    assert crate.count(declared) == 1
    assert compiles(c_of(crate.replace(declared, wrong)), tmp_path).returncode != 0
