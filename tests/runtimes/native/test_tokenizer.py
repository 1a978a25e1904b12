"""The tokenizer's C interface: Python's tokens and texts on Linux, Windows under wine and arm64 under qemu."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder
from tests.conftest import PROMPTS
from tests.support import arm64, golden, hf
from tests.support.chats import CONVERSATIONS, REFERENCE, TEMPLATES, model_folder
from tests.support.clang import Windows
from tests.support.jvm import classpath, environment, need_maven
from tests.support.rust_tokenizer import ARM, CRATE, LINKERS, LINUX, SYSTEM, WINDOWS, CTokenizer, build
from tests.support.selftest import NATIVE, TESTS

pytestmark = pytest.mark.nightly
EXAMPLE = NATIVE.parents[1] / "examples" / "c" / "greedy.c"
NEW = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of what cargo builds."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def library(target: Path) -> Path:
    return build(target) / "libedgespec_tokenizer.so"


def test_tokenizers_of_every_kind_as_in_python(library: Path, tmp_path: Path) -> None:
    for given in golden.tokenizers(tmp_path):
        folder = Path(given["folder"])
        codec, ours = TextCodec(folder), CTokenizer(library, folder / "tokenizer.json")
        assert ours.size == codec.vocab_size
        for case in given["cases"]:
            assert ours.encode(case["text"].encode()) == case["ids"], (folder.name, case["text"])
            assert ours.encode(case["text"].encode(), special=False) == case["bare"], (folder.name, case["text"])
        for case in given["decoded"]:
            ids = case["ids"]
            assert ours.decode(ids).decode() == case["text"], (folder.name, ids)
            stream = StreamDecoder(codec, ids[:2])
            pieces = [*(stream.push([token]) for token in ids[2:]), stream.finish()]
            assert ours.pieces(ids[:2], ids[2:]) == pieces, (folder.name, ids)
        ours.close()


def test_what_is_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.json: "):
        CTokenizer(library, tmp_path / "nothing.json")
    right = hf.make_tokenizer(300, True).to_str().encode()
    ours = CTokenizer(library, right)
    with pytest.raises(ValueError, match="expected a text in UTF-8"):
        ours.encode(b"\xff")
    with pytest.raises(ValueError, match="token -1: expected 0 to"):
        ours.decode([-1])
    assert ours.decode([1 << 31]) == b""  # as in Python
    assert ours.encode(b"a\0b") == hf.make_tokenizer(300, True).encode("a\0b").ids
    drawn = random.Random(1)
    refused = 0
    for at in range(150):
        bad = bytearray(right[: drawn.randrange(len(right))] if at % 3 == 0 else right)
        for _ in range(at % 4):
            bad[drawn.randrange(len(bad))] = drawn.choice(b'0{}[]",x\xff')
        refused += is_refused(library, bytes(bad))
    assert refused > 60


def is_refused(library: Path, json: bytes) -> bool:
    """Whether a tokenizer.json is; where it is not, it may be used."""
    try:
        CTokenizer(library, json).encode(b"some text")
    except ValueError as error:
        return bool(str(error))
    return False


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """Make a model's folder with a template."""
    return partial(model_folder, tmp_path)


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_as_in_transformers(library: Path, folder_of: Callable[[str], Path], template: str) -> None:
    ours, compared = CTokenizer(library, folder_of(template)), 0
    for name, chat in CONVERSATIONS.items():
        expected = REFERENCE[template][name]
        if "error" in expected:
            with pytest.raises(ValueError, match=re.escape(expected["error"]) or "."):
                ours.chat(chat)
            continue
        assert ours.chat(chat) == expected["ids"], name
        compared += 1
    assert compared > 3


@pytest.mark.parametrize("template", ["qwen25", "llama31", "gemma"])
def test_special_tokens_in_messages_are_text(library: Path, folder_of: Callable[[str], Path], template: str) -> None:
    folder, drawn = folder_of(template), random.Random(len(template))
    codec, ours, compared = TextCodec(folder), CTokenizer(library, folder), 0
    words = [*codec.control.words, "<|im_", "hello", " ", "\n", "<", "|>", "\ue000", "\\ue001", '"', "<think>"]
    for _ in range(150):
        messages = [
            {"role": role, "content": "".join(drawn.choices(words, k=drawn.randrange(1, 6)))}
            for role in ("user", "assistant", "user")
        ]
        assert ours.chat(messages) == codec.chat(messages), messages
        continued = codec.chat(messages, continue_final=True)
        assert ours.chat({"messages": messages, "continue_final": True}) == continued, messages
        compared += any(word in one["content"] for one in messages for word in codec.control.words)
    assert compared > 50


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{%- for m in messages %}\n    {%- if loop.last %}{%- break %}{%- endif %}{{ m.role }}{%- endfor %}", "user"),
        ("{% if true %}\n  a\n{% endif %}b\n", "  a\nb"),
        ("{{ tools | tojson }}{{ tools | tojson(indent=1) }}", '[{"n": "\u00e9", "x": [1, 1.0, null, true, {}]}][\n {\n'
         '  "n": "\u00e9",\n  "x": [\n   1,\n   1.0,\n   null,\n   true,\n   {}\n  ]\n }\n]'),
        ("{{ none }}{{ tools }}", "None[{'n': '\u00e9', 'x': [1, 1.0, None, True, {}]}]"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% generation %}\na{% endgeneration %}{{ missing is defined }}{{ missing }}", "aFalse"),
        ("{{ messages[0]['content'].split(' ') | last }}{{ messages[0].content[:3].upper() }}", "long?HOW"),
        ("{{ 'a' is iterable and {} is sequence and 1 is not iterable }}", "True"),
    ],
)  # fmt: skip
def test_what_templates_write(library: Path, tmp_path: Path, template: str, expected: str) -> None:
    hf.make_tokenizer(400, True).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    tools: list[dict[str, Any]] = [{"n": "\u00e9", "x": [1, 1.0, None, True, {}]}]
    messages = [{"role": "user", "content": "how long?"}, {"role": "assistant", "content": "long"}]
    codec, ours = TextCodec(tmp_path), CTokenizer(library, tmp_path)
    assert codec.write_chat(messages, tools) == expected
    assert ours.chat({"messages": messages, "tools": tools}) == codec.chat(messages, tools)


@pytest.mark.parametrize(
    "write", ["{{ text }}", "{{ text | trim }}", "{{ text | tojson }}", "{{ text }}{{ text[:9] }}", ""]
)
@pytest.mark.parametrize(
    "content", ["", "My lord, ", " \n", "<|im_", {"text": "I. "}, "EDGESPEC_THE_ANSWER_GOES_ON_HERE ", 1]
)
def test_a_message_is_continued(library: Path, tmp_path: Path, write: str, content: Any) -> None:
    hf.make_tokenizer(400, True).save(str(tmp_path / "tokenizer.json"))
    start = "{% if add_generation_prompt %}assistant{% endif %}"
    blocks = "{% set text = m.content if m.content is string else m.content[0].text %}"
    template = f"{{% for m in messages %}}{blocks}{{{{ m.role }}}}: {write}.{{% endfor %}}{start}"
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    last = [{"type": "text", **content}, {"type": "image"}] if isinstance(content, dict) else content
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Who is there?"},
        {"role": "assistant", "content": last},
    ]
    codec, ours = TextCodec(tmp_path), CTokenizer(library, tmp_path)
    try:
        expected = codec.chat(messages, continue_final=True)
    except InvalidRequest as error:
        assert content == 1 or not write
        with pytest.raises(ValueError, match=re.escape(str(error).splitlines()[0])):
            ours.chat({"messages": messages, "continue_final": True})
        return
    assert write
    assert ours.chat({"messages": messages, "continue_final": True}) == expected
    assert ours.chat({"messages": messages, "continue_final": True, "generation_prompt": False}) == expected


@pytest.mark.parametrize(
    "conversation, why",
    [
        ([], "at least one message"),
        ({}, "list of messages"),
        ([1], "a JSON object"),
        ({"messages": [{}], "tools": 1}, "tools as a list"),
        ({"messages": [{}], "options": {"messages": 1}}, "no option of a template"),
        ({"messages": [{}], "other": 1}, "other: expected"),
        ({"messages": [{}], "continue_final": 1}, "expected continue_final"),
        ([{"role": "user", "content": "loop"}], "refuses these messages"),
    ],
)
def test_conversations_that_are_refused(library: Path, tmp_path: Path, conversation: Any, why: str) -> None:
    hf.make_tokenizer(300, True).save(str(tmp_path / "tokenizer.json"))
    endless = "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3
    (tmp_path / "chat_template.jinja").write_text(endless, "utf-8")
    with pytest.raises(ValueError, match=why):
        CTokenizer(library, tmp_path).chat(conversation)


@pytest.mark.usefixtures("native")
def test_a_program_chats(engines: Callable[..., Engine], tmp_path: Path, library: Path) -> None:
    engine, native = engines("native"), native_library().path
    assert native is not None
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in engine.bundle.path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(hf.CHAT_TEMPLATE, "utf-8")
    codec, lines = TextCodec(folder), ['Who\'s "there"?', "My lord,"]
    flags = [
        "-std=c11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        f"-I{NATIVE}",
        f"-Wl,-rpath,{native.parent}",
    ]
    program = tmp_path / "chat"
    subprocess.run(["gcc", *flags, str(EXAMPLE.parent / "chat.c"), str(native), "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(folder), str(library)], input="\n".join(lines), capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, expected = list[dict[str, Any]](), ""
    for line in lines:
        said.append({"role": "user", "content": line})
        said.append({"role": "assistant", "content": engine.generate(codec.chat(said), method="ar").text})
        expected += said[-1]["content"] + "\n"
    assert done.stdout == expected


@pytest.mark.usefixtures("native")
def test_kotlin_takes_it_in_the_place_of_djls(library: Path, bundles: Callable[..., Path], tmp_path: Path) -> None:
    need_maven()
    made, bundle = golden.tokenizers(tmp_path), bundles("native", "int4")
    told_of = {"path": str(bundle), "operators": "native", "format": "int4"}
    data: dict[str, Any] = {"library": str(native_library().path), "bundles": [told_of], "tokenizers": made}
    data["conversation"] = golden.conversation(bundle, tmp_path)
    (tmp_path / "golden.json").write_text(json.dumps(data), "utf-8")
    classes = ":".join(
        path for path in classpath(tmp_path / "built").split(":") if "djl" not in path and "jna" not in path
    )
    told = [f"-Djava.library.path={library.parent}", f"-Dedgespec.golden={tmp_path / 'golden.json'}"]
    done = subprocess.run(["java", *told, "dev.edgespec.runtimes.TextTestKt"], capture_output=True, text=True,
                          timeout=300, env=environment(classes))  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{len(made)} tokenizers; not a readable tokenizer: data did not match")


def check_texts(engine: Engine, words: list[str], **environment: str) -> None:
    ends = ",".join(map(str, engine.bundle.manifest.tokenizer.eos))
    for prompt in PROMPTS[:3]:
        expected = engine.generate(prompt, method="ar", max_new_tokens=NEW).text
        folder = engine.bundle.path
        command = [*words, str(folder / "model.native.onnx"), str(NEW), ends, str(folder / "tokenizer.json"), prompt]
        done = subprocess.run(command, capture_output=True, timeout=300, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().replace("\r\n", "\n") == f"{expected}\n"


def example(folder: Path, system: str, target: Path, library: Path) -> Path:
    """Build the example that reads and writes text for a system."""
    path = folder / ("greedy.exe" if system == WINDOWS else "greedy")
    if system == WINDOWS:
        made = ["-shared", str(TESTS / "bcryptprimitives.c"), "-ladvapi32", "-o", str(folder / "bcryptprimitives.dll")]
        subprocess.run([LINKERS[system], *made], check=True, timeout=300)
    static = build(target, system) / "libedgespec_tokenizer.a"
    command = [LINKERS.get(system, "gcc"), "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-DTOKENIZER",
               f"-I{NATIVE}", f"-I{CRATE}", str(EXAMPLE), str(static), str(library), *SYSTEM[system]]  # fmt: skip
    own = [] if system == WINDOWS else [f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*command, *own, "-o", str(path)], check=True, timeout=300)
    return path


@pytest.mark.usefixtures("native")
def test_text_to_text(engines: Callable[..., Engine], tmp_path: Path, target: Path) -> None:
    library = native_library().path
    assert library is not None
    check_texts(engines("native"), [str(example(tmp_path, LINUX, target, library))])


def test_text_to_text_on_arm(arm_library: Path, engines: Callable[..., Engine], tmp_path: Path, target: Path) -> None:
    emulator, program = arm64.emulator(), example(tmp_path, ARM, target, arm_library)
    assert emulator
    check_texts(engines("native"), [emulator, "-L", str(arm64.CROSS.parent), str(program)])


def test_text_to_text_on_windows(engines: Callable[..., Engine], tmp_path: Path, target: Path) -> None:
    windows = Windows(tmp_path)
    program = example(windows.library.parent, WINDOWS, target, windows.library)
    check_texts(engines("native"), ["wine", str(program)], **windows.environment)
