"""A recording of commands, and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import make_recording


def test_what_commands_say_comes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, picture = tmp_path / "a.cast", tmp_path / "a.svg"
    commands = [f"{sys.executable} -c 'print(1 < 2)'", f"{sys.executable} -c 'print(3)'"]
    monkeypatch.setattr(sys, "argv", ["record", "record", str(recording), *commands])
    make_recording.main()
    header, *events = map(json.loads, recording.read_text("utf-8").splitlines())
    assert header["version"] == 2
    assert [text for _, _, text in events] == [
        f"$ {commands[0]}\r\n",
        "True\r\n",
        f"$ {commands[1]}\r\n",
        "3\r\n",
        "$ ",
    ]
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    monkeypatch.setattr(sys, "argv", ["picture", "picture", str(recording), str(picture)])
    make_recording.main()
    texts = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("True", "3")] == ["True", "3"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_chat_is_typed_into_a_terminal(tmp_path: Path) -> None:
    output = tmp_path / "chat.cast"
    program = "while True:\n    line = input('you> ')\n    print('said ' + line)\n    if line == 'end': break"
    (tmp_path / "talk.py").write_text(program, "utf-8")
    make_recording.record_chat(output, ["install it", f"{sys.executable} {tmp_path / 'talk.py'}"], ["hello", "end"])
    texts = [json.loads(line)[2].strip() for line in output.read_text("utf-8").splitlines()[1:]]
    assert texts[0] == "$ install it"  # shown, not run
    assert [text for text in texts if text.startswith("said")] == ["said hello", "said end"]
