"""Pictures over HTTP, as OpenAI's own client asks for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from edgespec.engine.loading import load
from tests.images.test_drawing import bundle as bundle
from tests.server.conftest import Later, Served, start, stop

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")


@pytest.fixture(scope="module")
def server(bundle: Path, bundles: Callable[..., Path]) -> Iterator[Served]:
    running = start(bundle, "--name", "painter", "--name", "poet", str(bundles("native")))
    yield running
    stop(running)


def test_pictures_are_the_engines(server: Served, bundle: Path) -> None:
    with load(bundle, threads=1) as engine:
        wanted = [engine.draw("3", seed=seed, temperature=1.0, acceptance="coupled").pixels for seed in (4, 5)]
    with server.openai(timeout=60) as client:
        images: Any = client.images
        own = {"seed": 4, "temperature": 1.0}
        told = images.generate(model="painter", prompt="3", n=2, extra_body=own)
        found = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one.b64_json)))) for one in told.data]
        assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
        assert not np.array_equal(found[0], found[1])
        relaxed = images.generate(model="painter", prompt="3", extra_body={"accept": "lantern:40,1"})
        assert "LANTERN" in relaxed.edgespec[0]["approximations"][-1]
        models: list[Any] = list(client.models.list())
        assert [one.edgespec["draws"] for one in models] == [True, False]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"model": "poet"}, "does not draw"),
            ({"prompt": "a house"}, "does not know"),
            ({"size": "512x512"}, "size"),
            ({"response_format": "url"}, "response_format"),
            ({"extra_body": {"method": "magic"}}, "magic"),
        ]
        for asked, message in refused:
            with pytest.raises(openai.BadRequestError, match=message):
                images.generate(**{"model": "painter", "prompt": "3", "n": 1} | asked)
