"""The tokenizer's C interface (edgespec/runtimes/tokenizer): built by cargo, and called through ctypes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from tests.support.required import need
from tests.support.selftest import NATIVE

CRATE = NATIVE.parent / "tokenizer"
LINUX, ARM, WINDOWS = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "x86_64-pc-windows-gnu"
ANDROID = "aarch64-linux-android"
LINKERS = {ARM: "aarch64-linux-gnu-gcc", WINDOWS: "x86_64-w64-mingw32-gcc-posix"}
SYSTEM = {
    LINUX: ("-lgcc_s", "-lpthread", "-lm", "-ldl"),
    ARM: ("-lgcc_s", "-lpthread", "-lm", "-ldl"),
    WINDOWS: ("-lkernel32", "-lntdll", "-luserenv", "-lws2_32", "-ldbghelp"),
}
"""Other libraries that a program over the static library must link."""
LIMIT = 1800  # seconds: a busy machine may be slow


def build(folder: Path, target: str = LINUX, release: bool = False) -> Path:
    """Build the crate for a system, or skip the test -> the folder with its libraries."""
    need("cargo", "rustup", "to build the tokenizer")
    _run("rustup", "target", "add", target)
    place = {"CARGO_TARGET_DIR": str(folder)}
    if linker := LINKERS.get(target):
        need(linker, f"to build for {target}")
        place[f"CARGO_TARGET_{target.upper().replace('-', '_')}_LINKER"] = linker
    kind = ("rustc", "--crate-type", "staticlib") if target == ANDROID else ("build",)  # the NDK's linker is not here
    _run("cargo", *kind, "--locked", "--jobs", "2", "--target", target, *(["--release"] if release else []), **place)
    return folder / target / ("release" if release else "debug")


def _run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=CRATE, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


class CTokenizer:
    """A tokenizer through the C interface; ValueError: something was refused.

    Args:
        library: of the crate.
        source: the content of a tokenizer.json, its path, or that of its folder, for chat templates too.
    """

    def __init__(self, library: Path, source: bytes | Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.edgespec_tokenizer_error.restype = c_char_p
        self._library.edgespec_tokenizer_size.restype = c_size_t
        self._at = c_void_p()
        if isinstance(source, Path):
            kind = "_folder" if source.is_dir() else ""
            self._call(f"edgespec_tokenizer_open{kind}", os.fsencode(source), byref(self._at))
        else:
            self._call("edgespec_tokenizer_parse", source, c_size_t(len(source)), byref(self._at))
        self.size: int = self._library.edgespec_tokenizer_size(self._at)

    def close(self) -> None:
        self._library.edgespec_tokenizer_close(self._at)

    def encode(self, text: bytes, special: bool = True) -> list[int]:
        room, count = len(text) + 8, c_size_t()
        ids = (c_int64 * room)()
        self._call("edgespec_tokenizer_encode", self._at, text, c_size_t(len(text)), c_int32(special), ids,
                   c_size_t(room), byref(count))  # fmt: skip
        return ids[: min(room, count.value)]

    def chat(self, conversation: Any) -> list[int]:
        said, room, count = json.dumps(conversation).encode(), 1 << 16, c_size_t()
        ids = (c_int64 * room)()
        self._call("edgespec_tokenizer_encode_chat", self._at, said, c_size_t(len(said)), ids, c_size_t(room),
                   byref(count))  # fmt: skip
        return ids[: min(room, count.value)]

    def decode(self, ids: Sequence[int], room: int = 4096) -> bytes:
        text, size = ctypes.create_string_buffer(room), c_size_t()
        self._call("edgespec_tokenizer_decode", self._at, (c_int64 * len(ids))(*ids), c_size_t(len(ids)), text,
                   c_size_t(room), byref(size))  # fmt: skip
        return text.raw[: size.value]

    def pieces(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds after a prompt, and the rest at the end."""
        stream, text, size = c_void_p(), c_void_p(), c_size_t()
        begin = (c_int64 * len(prompt))(*prompt)
        self._call("edgespec_stream_open", self._at, begin, c_size_t(len(prompt)), byref(stream))
        found = []
        for token in (*tokens, None):
            if token is None:
                self._call("edgespec_stream_finish", stream, byref(text), byref(size))
            else:
                self._call("edgespec_stream_push", stream, c_int64(token), byref(text), byref(size))
            found.append(ctypes.string_at(text, size.value).decode() if size.value else "")
        self._library.edgespec_stream_close(stream)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments):
            raise ValueError(self._library.edgespec_tokenizer_error().decode())
