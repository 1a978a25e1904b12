"""Chat answers that continue the assistant's last message."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from edgespec.server.app import make_app
from tests.server.conftest import models_of


def test_an_answer_goes_on_where_it_was_cut(chat_bundle: Path) -> None:
    """Two requests give the text of one."""
    with TestClient(make_app(models_of(chat_bundle, "chatty")), base_url="http://localhost:8000") as client:

        def answer(messages: list[dict[str, str]], tokens: int, **fields: object) -> str:
            body = {"model": "chatty", "messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
            return str(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])

        asked = [{"role": "user", "content": "Good night, good night!"}]
        whole, first = answer(asked, 24), answer(asked, 12)
        said = [*asked, {"role": "assistant", "content": first}]
        rest = answer(said, 12, continue_final_message=True)
        assert first + rest == whole
        assert answer(said, 12) != rest  # another answer begins otherwise
        body = {"model": "chatty", "messages": asked, "continue_final_message": True}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "the assistant's" in refused.json()["error"]["message"]
