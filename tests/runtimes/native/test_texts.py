"""The text of C's sessions: pieces, stop texts and conversations as Python writes them, by any codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder
from tests.conftest import PROMPTS
from tests.support import golden
from tests.support.c_sessions import NO_FILE, Bundle, Refused, RoundFound, codec_of, settings_of

pytestmark = pytest.mark.usefixtures("native")
METHODS = "plain", "ngram", "speculative"
SAMPLED = SamplingParams(1.2, seed=3, acceptance="coupled")
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": 'Who\'s "there"?\n\t\\ \x01 é'},
    {"role": "assistant", "content": "I."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> list[TextCodec]:
    """Tokenizers of every kind."""
    made = golden.tokenizers(tmp_path_factory.mktemp("tokenizers"))
    return [TextCodec(Path(one["folder"])) for one in made]


def expected(
    codec: TextCodec, prompt: Sequence[int], rounds: Sequence[RoundFound], stop: Sequence[str]
) -> tuple[list[int], str, str | None]:
    """Give what Python makes of rounds: tokens, text, and why it ended."""
    stream, tokens, text = StreamDecoder(codec, prompt, stop), list[int](), ""
    for one in rounds:
        for at, token in enumerate(one.tokens):
            tokens.append(token)
            if one.finish != "eos" or at + 1 < len(one.tokens):
                text += stream.push([token])
            if stream.stopped is not None:
                return tokens, text, "stop"
    return tokens, text + stream.finish(), rounds[-1].finish


def stops_in(text: str, rng: np.random.Generator) -> list[str]:
    """Choose texts that end it, and others that almost do."""
    found = ["", "zzz", text + "more"]
    for _ in range(int(rng.integers(3)) if text else 0):
        begin = int(rng.integers(len(text)))
        found.append(text[begin : begin + int(rng.integers(1, 6))])
    return found


@pytest.mark.parametrize("method", METHODS)
def test_pieces_and_stop_texts(bundles: Callable[..., Path], codecs: list[TextCodec], method: str) -> None:
    rng, stopped = np.random.default_rng(len(method)), 0
    for codec in codecs:
        with Bundle(bundles("native")) as bundle:
            bundle.set_codec(codec_of(codec))
            with bundle.session() as session:
                for _ in range(4):
                    prompt = rng.integers(bundle.facts.vocab, size=int(rng.integers(1, 30))).tolist()
                    plain = session.rounds(prompt, settings_of(SAMPLED, method, 40, 5))
                    tokens, text, _ = expected(codec, prompt, plain, ())
                    assert "".join(one.text or "" for one in plain) == text
                    stop = stops_in(text, rng)
                    ours = session.rounds(prompt, settings_of(SAMPLED, method, 40, 5, stop_texts=stop))
                    told = [token for one in ours for token in one.tokens]
                    found = told, "".join(one.text or "" for one in ours), ours[-1].finish
                    assert found == expected(codec, prompt, plain, stop), (stop, tokens)
                    assert session.counts().tokens == len(told)
                    assert session.counts().accepted == sum(one.accepted for one in ours)
                    assert all(one.accepted <= len(one.tokens) for one in ours)
                    stopped += found[2] == "stop"
    assert stopped > 3


def test_a_token_that_ends_the_text_is_none(engines: Callable[..., Engine], bundles: Callable[..., Path]) -> None:
    engine = engines("native")
    prompt = engine.codec.encode(PROMPTS[0])
    with Bundle(bundles("native")) as bundle:
        bundle.set_codec(codec_of(engine.codec))
        with bundle.session() as session:
            text = session.generate(prompt, settings_of(tokens=12))
            ended = session.rounds(prompt, settings_of(tokens=12, stops=text[-1:]))
    end = text.index(text[-1])
    assert "".join(one.text or "" for one in ended) == engine.codec.continuation(prompt, text[:end])


def test_conversations(engines: Callable[..., Engine], bundles: Callable[..., Path]) -> None:
    engine, closed = engines("native"), list[int]()
    codec = TextCodec(bundles("native"))
    codec.templates = {"default": TEMPLATE}
    with Bundle(bundles("native")) as bundle:
        bundle.set_codec(codec_of(codec, lambda: closed.append(1)))
        assert bundle.encode_chat(MESSAGES) == codec.chat(MESSAGES)
        assert bundle.encode("My lord,") == codec.encode("My lord,")
        assert bundle.encode("My lord,", special=False) == codec.encode("My lord,", special=False)
        assert bundle.decode(codec.encode("My lord,")) == codec.decode(codec.encode("My lord,"))
        with pytest.raises(Refused, match="at least one message"):
            bundle.encode_chat([])
        session = bundle.session()
        answer = session.chat(MESSAGES, settings_of(method="ngram", tokens=24))
        prompt = codec.chat(MESSAGES)
        assert answer == engine.generate(prompt, method="ar", max_new_tokens=24, ignore_eos=True).text
        more = [*MESSAGES, {"role": "assistant", "content": answer}, MESSAGES[0]]
        session.chat(more, settings_of(method="ngram", tokens=4))
        assert session.counts().reused_tokens >= len(prompt) - 2
        with pytest.raises(Refused, match="without a codec and without sessions"):
            bundle.set_codec(codec_of(codec))
    assert not closed
    session.close()
    assert closed == [1]


def test_what_is_refused(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with Bundle(bundles("native")) as bundle:
        with pytest.raises(Refused, match="has no codec"):
            bundle.encode("a")
        with bundle.session() as session, pytest.raises(Refused, match="need a codec"):
            session.begin([1], settings_of(stop_texts=["a"]))
        with pytest.raises(Refused, match="nothing") as refused:
            bundle.load_codec(tmp_path / "nothing.so")
        assert refused.value.status == NO_FILE
        codec = TextCodec(bundles("native"))
        codec.templates = {"default": "{{ raise_exception('roles must alternate') }}"}
        bundle.set_codec(codec_of(codec))
        with pytest.raises(Refused, match="roles must alternate"):
            bundle.encode_chat(MESSAGES)
        assert settings_of().stop_text_count == 0
