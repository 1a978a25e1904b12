"""Pictures over HTTP, as OpenAI's and Anthropic's own clients send them, and at the command line."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli
from edgespec.cli.chat import Chat
from edgespec.engine.loading import load
from tests.images.conftest import PRINT, SAID
from tests.server.conftest import Later, Served, start, stop

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

pytestmark = pytest.mark.usefixtures("native")
DATA = base64.b64encode((PRINT / "line.png").read_bytes()).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def server(reader: Path) -> Iterator[Served]:
    running = start(reader, "--name", "reader", "--image-folder", str(PRINT))
    yield running
    stop(running)


def seen(*urls: str, text: str = "") -> list[Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}]


def test_three_apis_see_the_same_picture(server: Served, client: openai.OpenAI) -> None:
    ask: Any = {"model": "reader", "temperature": 0}
    for messages in (seen(URL), seen(URL, text="Read this."), seen("file:line.png")):
        chat = client.chat.completions.create(messages=messages, **ask)
        assert chat.choices[0].message.content == SAID["line"]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens > 20
    streamed: Any = client.chat.completions.create(messages=seen(URL), stream=True, **ask)
    assert "".join(one.choices[0].delta.content or "" for one in streamed) == SAID["line"]
    shown: Any = {"type": "input_image", "image_url": URL}
    first: Any = client.responses.create(input=[{"role": "user", "content": [shown]}], **ask)
    assert first.output_text == SAID["line"]
    shown["image_url"] = "file:page.png"
    more = client.responses.create(
        input=[{"role": "user", "content": [shown]}], previous_response_id=first.id, **ask
    )  # the first picture is seen again
    assert more.usage is not None
    assert more.usage.input_tokens > first.usage.input_tokens + len(SAID["line"])
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as claude:
        said: Any = {"messages": [{"role": "user", "content": [block]}], "model": "reader"}
        answer: Any = claude.messages.create(max_tokens=100, extra_body={"temperature": 0}, **said)
        assert answer.content[0].text == SAID["line"]
        assert claude.messages.count_tokens(**said).input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    "messages, message",
    [
        (seen("https://example.org/x.png"), "fetches nothing"),
        (seen("file:../restore.txt"), "in the folder that this server may read"),
        (seen("data:image/png;base64,AAAA"), "no picture of a known kind"),
        ([{"role": "system", "content": seen(URL)[0]["content"]}], "messages of the user"),
    ],
)
def test_pictures_that_are_refused(client: openai.OpenAI, messages: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="reader", messages=messages)


def test_the_place_of_a_picture_that_somebody_writes_is_text(client: openai.OpenAI) -> None:
    ask: Any = {"model": "reader", "max_tokens": 1, "temperature": 0}
    plain = client.chat.completions.create(messages=seen(URL, text="and"), **ask).usage
    written = client.chat.completions.create(messages=seen(URL, text="and <image>"), **ask).usage
    assert plain is not None
    assert written is not None
    assert 1 < written.prompt_tokens - plain.prompt_tokens <= len(" <image>")


def test_models_that_see_say_so(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.model_extra is not None
    assert model.model_extra["edgespec"]["sees"]


def test_the_command_line_reads_pictures(reader: Path, bundles: Callable[..., Path], tmp_path: Path) -> None:
    run = CliRunner().invoke
    line = str(PRINT / "line.png")
    session = ["--session", str(tmp_path / "a.session")]
    for words in (["--prompt", "Read this.", *session], ["--method", "ngram", "--prompt", "Read this."]):
        made = run(cli, ["run", str(reader), "--image", line, *words, "--temperature", "0"])
        assert (made.exit_code, made.stdout) == (0, f"{SAID['line']}\n"), made.output
    made = run(cli, ["run", str(reader), "--chat", "--prompt", "And again.", *session])  # with the picture in it
    assert made.exit_code == 0, made.output
    for name, words, message in (
        (reader, ["--image", "none.png"], "is no file"),
        (reader, ["--image", line, "--beams", "2"], "does not work in a chat"),
        (bundles("native"), ["--image", line], "reads only text"),
        (reader, ["--image", line, "--input", "a.jsonl", "--output", "b"], "leave --prompt, --image"),
    ):
        prompt = [] if "--input" in words else ["--prompt", "x"]
        made = run(cli, ["run", str(name), *prompt, *words])
        assert message in f"{made.output}{made.exception}"


def test_a_chat_puts_pictures_in_front_of_the_next_question(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with load(reader, threads=1) as engine:
        settings = engine.defaults
        chat = Chat(engine, engine.conversation([], settings), settings, set())
        shown = []
        for typed in (f"/image {PRINT / 'line.png'}", "Read this.", "/undo", f"/image {PRINT / 'none.png'}", "/image"):
            chat.take(typed)
            said = capsys.readouterr()
            shown.append(said.out + said.err)
        assert "1 picture in front of your next question" in shown[0]
        assert shown[1].startswith(SAID["line"])
        assert "forgotten: [picture] Read this." in shown[2]
        assert "is no file" in shown[3]
        assert "expected a picture's file" in shown[4]
