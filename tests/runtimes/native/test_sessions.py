"""Sessions of the C interface write the very texts of Python's loop, round by round."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import SkipSet
from edgespec.drafters.ngram import NGram
from edgespec.drafters.ngram_stores import NGramStore, build_store
from edgespec.drafters.plain import Plain
from edgespec.drafters.predicted import Predicted
from edgespec.drafters.registry import AR, AUTO, CHAIN
from edgespec.drafters.registry import METHODS as METHODS_OF_PYTHON
from edgespec.drafters.self_spec import SelfSpec
from edgespec.engine.engine import Engine
from edgespec.runtimes.files.manifest import MANIFEST, SCHEMA
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from tests.conftest import PROMPTS, Written
from tests.runtimes.native.conftest import DRAFTERS
from tests.support.both_loops import (
    GREEDY,
    HOSTILE,
    NODES,
    PLAIN,
    SAMPLED,
    Both,
    methods_of,
    random_methods,
    random_texts,
    with_costs,
)
from tests.support.c_sessions import (
    CANCELLED,
    FULL,
    MASK,
    NO_FILE,
    NO_MEMORY,
    PROGRESS,
    REFUSED,
    Bundle,
    Refused,
    RoundFound,
    Session,
    Settings,
    settings_of,
)
from tests.support.required import need
from tests.support.selftest import (
    LOOP,
    NATIVE,
    OPERATOR,
    READERS,
    SANITIZED,
    THREADS,
    compiled,
    host_compiler,
    linked,
)
from tests.support.selftest import PLAIN as PLAIN_FLAGS

pytestmark = pytest.mark.usefixtures("native")
FORMS = "int4", "int8"
METHODS = (PLAIN, "ngram", "speculative", "self-spec", "ngram,self-spec", "self-spec,speculative", "medusa",
           "blockwise", "ngram,medusa")  # fmt: skip
TREES: tuple[tuple[int, ...], ...] = ((2,), (3, 2), (2, 2, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_rounds_are_those_of_python(both: Callable[[str], Both], form: str, method: str) -> None:
    found, rounds = both(form), list[RoundFound]()
    for prompt, rng in random_texts(6, len(method), found.target.vocab_size):
        for params in (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection", seed=-3)):
            rounds += found.compare(prompt, params, method, int(rng.integers(1, 9)), 24)
    if method != "plain":
        assert any(one.accepted for one in rounds)
        assert any(one.rejected for one in rounds)


@pytest.mark.parametrize("params", HOSTILE)
def test_hostile_settings(both: Callable[[str], Both], params: SamplingParams) -> None:
    found = both("int4")
    for at, (prompt, _) in enumerate(random_texts(3, 7, found.target.vocab_size)):
        for method in METHODS[1:4]:
            for acceptance in ("coupled", "rejection"):
                wanted = replace(params, seed=at, acceptance=acceptance)
                found.compare(prompt, wanted, method, 5, 16)


@pytest.mark.parametrize("cycles", [1, 3])
def test_blocks_that_are_refined(both: Callable[[str], Both], cycles: int) -> None:
    found, accepted = replace(both("int4"), cycles=cycles), 0
    for prompt, rng in random_texts(6, cycles, found.target.vocab_size):
        for params in (GREEDY, SAMPLED):
            case = prompt, params, "blockwise", int(rng.integers(1, 9)), 24
            accepted += sum(one.accepted for one in found.compare(*case))
    assert accepted


@pytest.mark.parametrize("branch", TREES)
def test_trees_of_guesses(both: Callable[[str], Both], branch: tuple[int, ...]) -> None:
    found, accepted = both("int4"), 0
    for prompt, _ in random_texts(3, 11, found.target.vocab_size):
        for params in (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection"),
                       SamplingParams(0.0, repetition_penalty=1.3, frequency_penalty=0.5)):  # fmt: skip
            accepted += sum(one.accepted for one in found.compare(prompt, params, "speculative", 4, 20, branch=branch))
    assert accepted


def test_blocks_of_guesses(both: Callable[[str], Both]) -> None:
    found = both("int4")
    for prompt, rng in random_texts(8, 13, found.target.vocab_size):
        params = SamplingParams(1.1, top_k=20, seed=int(rng.integers(1 << 40)), verification="block")
        found.compare(prompt, params, "speculative", 6, 24)


def controlled_texts(found: Both, method: str, folder: Path) -> set[int]:
    """Compare texts of bundles whose manifests give costs -> how many guesses rounds had."""
    lengths, rng = set[int](), np.random.default_rng(len(method))
    for number in range(4):
        with_costs(found, folder / str(number), rng)
        given = Both.open(folder / str(number))
        for prompt, _ in random_texts(2, number, found.target.vocab_size):
            params = SamplingParams(0.8, top_k=30, seed=int(rng.integers(1 << 40)))
            lengths |= {len(one.drafted) for one in given.controlled(prompt, params, method, 100)}
        given.close()
    return lengths


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [*METHODS[1:], AUTO])
def test_control_of_a_seeded_text(both: Callable[[str], Both], form: str, method: str, tmp_path: Path) -> None:
    """A seed decides a text that is sampled by rejection: nothing depends on the clock, so the rounds are the same."""
    assert len(controlled_texts(both(form), method, tmp_path)) > 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_control_of_a_drafter(both: Callable[[str], Both], name: str, tmp_path: Path) -> None:
    kind = DRAFTERS[name]
    for method in (kind, f"ngram,{kind}", AUTO):
        (tmp_path / method).mkdir()
        assert controlled_texts(both(name), method, tmp_path / method)


def test_a_bundle_that_nobody_prepared_drafts_by_its_planes(both: Callable[[str], Both], tmp_path: Path) -> None:
    for form in FORMS:
        found, folder = both(form), tmp_path / form
        data = with_costs(found, folder, np.random.default_rng(1))
        del data["methods"]["self-spec"], data["draft"], data["methods"]["speculative"]
        (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
        with Bundle(folder) as bundle, bundle.session() as session:
            assert not bundle.facts.has_draft
            with pytest.raises(Refused, match="plain, ngram"):
                session.begin([1], settings_of(method="speculative"))
            if form == "int4":
                with pytest.raises(Refused, match="plain, ngram"):
                    session.begin([1], settings_of(method="self-spec"))
                continue
            layers = found.target.layers
            drafter = SelfSpec(found.target, SkipSet.all_high(layers))
            found.target.follow([])
            theirs = list(decode(found.target, drafter, [1, 2, 3], DecodeOptions(24, 5)))
            ours = session.rounds([1, 2, 3], settings_of(method="self-spec", tokens=24, guesses=5))
            assert [(one.tokens, one.drafted) for one in ours] == [(one.tokens, one.drafted) for one in theirs]


@pytest.mark.parametrize("method", [*METHODS, AUTO])
def test_control_changes_no_text(both: Callable[[str], Both], method: str) -> None:
    found, drafted = both("int8"), 0
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for prompt, _ in random_texts(4, 43, found.target.vocab_size):
            for params in (GREEDY, SAMPLED):
                text = session.generate(prompt, settings_of(params, method, 60, fixed=0))
                drafted += session.counts().drafted
                assert session.counts().dropped == b""
                assert text == found.plain(prompt, params, 60)
    assert drafted or method == "plain"


def test_texts_end_alike(both: Callable[[str], Both]) -> None:
    found = both("int4")
    (prompt, _), *_ = random_texts(1, 17, found.target.vocab_size)
    text = found.plain(prompt, SAMPLED, 40)
    for method in METHODS:
        for at in (0, 3, 11, 39):
            ended = found.compare(prompt, SAMPLED, method, 6, 40, stops=[text[at], found.target.vocab_size + 5])
            assert ended[-1].finish == "eos"
        assert found.compare(prompt, SAMPLED, method, 6, 1)[-1].finish == "length"


def test_a_full_context_ends_a_text(both: Callable[[str], Both], bundles: Callable[..., Path]) -> None:
    found = both("int4")
    (prompt, _), *_ = random_texts(1, 19, found.target.vocab_size)
    context = len(prompt) + 13
    small = open_slot(Model(found.folder.path, found.folder.manifest.target, "native", 1), context=context)
    with Bundle(found.folder.path) as bundle, bundle.session(context=context) as session:
        limited = replace(found, target=small, session=session)
        for method in METHODS:
            assert limited.compare(prompt, GREEDY, method, 6, 1000)[-1].finish == "context"
        with pytest.raises(Refused, match="no room for a new one") as refused:
            session.begin([1] * context, settings_of())
        assert refused.value.status == FULL


def test_a_limit_of_memory_shortens_the_context(both: Callable[[str], Both]) -> None:
    found, lengths = both("int4"), list[int]()
    with Bundle(found.folder.path) as bundle:
        with pytest.raises(Refused, match="expected at least") as refused:
            bundle.session(max_bytes=1)
        assert refused.value.status == NO_MEMORY
        least = int(str(refused.value).rsplit(" ", 1)[1])
        for most in (least, 2 * least, 1 << 40):
            with bundle.session(max_bytes=most) as session:
                rounds = session.rounds([1, 2, 3], settings_of(SAMPLED, "speculative", 10**6, 4))
                assert rounds[-1].finish == "context"
                assert session.bytes() <= most
                lengths.append(3 + sum(len(one.tokens) for one in rounds))
    assert 128 <= lengths[0] < lengths[1] < lengths[2] == found.target.context


def test_an_ngram_store(both: Callable[[str], Both], tmp_path: Path) -> None:
    found = both("int4")
    vocab = found.target.vocab_size
    texts = [token for _ in range(3) for token in np.random.default_rng(3).integers(vocab, size=200)]
    digest = "ab" * 32
    build_store(tmp_path / "store", [np.array(texts, np.int32)], vocab, digest)
    known = [int(token) for token in texts[40:60]]
    with Bundle(found.folder.path) as bundle, bundle.session(store=tmp_path / "store") as session:
        stored = replace(found, session=session, store=NGramStore(tmp_path / "store"))
        (first, *_) = stored.compare(known, GREEDY, "ngram", 8, 24)
        assert first.drafted == texts[60 : 60 + len(first.drafted)] != []
        for prompt, _ in random_texts(4, 23, vocab):
            stored.compare(prompt + known, SAMPLED, "ngram", 8, 24)
    (tmp_path / "cut").write_bytes((tmp_path / "store").read_bytes()[:-1])
    (tmp_path / "other").write_bytes(b"EDGENGRN" + bytes(300))
    for name, words in (("cut", "truncated"), ("other", "not an n-gram store"), ("none", "cannot be opened")):
        with Bundle(found.folder.path) as bundle, pytest.raises(Refused, match=words):
            bundle.session(store=tmp_path / name)


@pytest.mark.parametrize("fixed", [0, 1])
def test_a_text_that_is_expected(both: Callable[[str], Both], fixed: int) -> None:
    found, accepted = both("int4"), 0
    for prompt, rng in random_texts(6, 47, found.target.vocab_size):
        text = found.plain(prompt, SAMPLED, 60)
        expected = [*text[:20], 5, 6, *text[24:40], *rng.integers(found.target.vocab_size, size=5).tolist(), *text[40:]]
        wanted = settings_of(SAMPLED, "ngram", 60, 6, prediction=expected, fixed=fixed)
        ours = found.session.rounds(prompt, wanted)
        accepted += sum(one.accepted for one in ours)
        assert [token for one in ours for token in one.tokens] == text
        if not fixed:  # what control makes of n-grams depends on the clock
            continue
        options = DecodeOptions(60, 6, sampling=replace(SAMPLED, prompt=len(prompt)),
                                first=[Predicted(expected, len(prompt))])  # fmt: skip
        found.target.follow([])
        theirs = decode(found.target, Policy([found.drafter("ngram")]), prompt, options)
        assert [(one.tokens, one.drafted) for one in ours] == [(one.tokens, one.drafted) for one in theirs]
    assert accepted > 150
    with pytest.raises(Refused, match="prediction: token -1"):
        found.session.begin([1], settings_of(prediction=[1, -1]))


def test_a_method_need_not_be_named(both: Callable[[str], Both]) -> None:
    found = both("int8")
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        text = session.generate([1, 2, 3], settings_of(method=None, tokens=200, fixed=0))
        assert session.counts().drafted
    assert text == found.plain([1, 2, 3], GREEDY, 200)


def with_short_head(path: Path, folder: Path, rows: int) -> Path:
    """Copy a bundle, with a draft that scores only so many tokens in usual texts."""
    shutil.copytree(path, folder)
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["methods"]["speculative"]["head_rows"] = rows
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return folder


@pytest.mark.parametrize("branch", [(), *TREES])
def test_a_draft_that_scores_frequent_tokens(
    both: Callable[[str], Both], tmp_path: Path, branch: tuple[int, ...]
) -> None:
    path, vocab = both("int4").folder.path, both("int4").target.vocab_size
    found, whole = Both.open(with_short_head(path, tmp_path / "bundle", vocab // 2)), both("int4")
    try:
        differs = 0
        for common in (True, False):
            for prompt, rng in random_texts(3, 5 + len(branch), vocab // 2 if common else vocab):
                for params in (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection"),
                               SamplingParams(0.0, repetition_penalty=1.3, logit_bias={vocab - 1: 3.0})):  # fmt: skip
                    case = prompt, params, "speculative", int(rng.integers(2, 6)), 20
                    rounds = found.compare(*case, branch=branch)
                    differs += rounds != whole.compare(*case, branch=branch)
        assert differs  # or the head would not have been shorter
    finally:
        found.close()


def test_a_draft_with_another_tokenizer_is_refused(both: Callable[[str], Both], tmp_path: Path) -> None:
    shutil.copytree(both("int4").folder.path, tmp_path / "bundle")
    file = tmp_path / "bundle" / "edgespec.json"
    manifest = json.loads(file.read_text("utf-8"))
    manifest["translation"] = {"matching": "strings", "tokens": "draft/target_tokens.bin", "shared": 9}
    file.write_text(json.dumps(manifest), "utf-8")
    with Bundle(tmp_path / "bundle") as bundle, bundle.session() as session:
        assert len(session.generate([1, 2], settings_of(tokens=3, method="ngram"))) == 3
        with pytest.raises(
            Refused, match="speculative: a draft with another tokenizer runs in Python alone: use ngram"
        ):
            session.generate([1, 2], settings_of(tokens=3, method="speculative"))


def test_a_session_reuses_what_it_has_read(both: Callable[[str], Both]) -> None:
    found = both("int4")
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        prompt = list(range(1, 60))
        first = session.generate(prompt, settings_of(tokens=20, method="speculative"))
        assert session.counts().reused_tokens == 0
        longer = prompt + first + [5, 6, 7]
        again = session.generate(longer, settings_of(tokens=20, method="ngram"))
        assert session.counts().reused_tokens >= len(prompt) + len(first) - 1
        assert again == found.plain(longer, GREEDY, 20)


def bundle_of(made: Written, folder: Path) -> Path:
    """Give a model of the tests a manifest, with a self-draft that leaves out a layer's parts."""
    folder.mkdir()
    for file in made.folder.iterdir():
        (folder / file.name).symlink_to(file)
    part = json.loads(made.part.model_dump_json())
    data = {
        "schema_version": SCHEMA, "target": part, "tokenizer": {"eos": []},
        "methods": {"self-spec": {"skip": {"attention": [1], "mlp": [0]}}},
        "files": {made.part.weights: {"size": 1, "sha256": "ab" * 32}},
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
    return folder


@pytest.mark.parametrize("name, form", [("lfm2_conv", "int8"), ("qwen3_5_delta", "int8"), ("gemma3_old", "int8")])
def test_other_models(writer: Callable[..., Written], name: str, form: str, tmp_path: Path) -> None:
    """States that cannot be cut back, windows: rounds are Python's, and a restored text continues as the saved one."""
    made = writer("native", name, form)
    slot, accepted = made.slot("native"), 0
    skip = SkipSet((1,), (0,))
    with Bundle(bundle_of(made, tmp_path / "bundle")) as bundle, bundle.session() as session:
        before: list[int] = []
        for number, (prompt, _) in enumerate(random_texts(8, 51, made.part.facts.vocab)):
            text = [*before, *prompt] if number % 2 else prompt  # half of them continue the text before
            for method, drafter in (("ngram", NGram()), ("self-spec", SelfSpec(slot, skip)), ("plain", Plain())):
                params = SAMPLED if number % 3 == 2 else GREEDY
                slot.follow([])
                options = DecodeOptions(24, 4, sampling=replace(params, prompt=len(text)))
                theirs = [(one.tokens, one.drafted) for one in decode(slot, drafter, text, options)]
                ours = session.rounds(text, settings_of(params, method, 24, 4))
                assert [(one.tokens, one.drafted) for one in ours] == theirs
                accepted += sum(one.accepted for one in ours)
            before = [*text, *(token for one in ours for token in one.tokens)][:150]
            session.save(tmp_path / "text")
            with bundle.session() as other:
                held = other.restore(tmp_path / "text")
                assert held == len(text) + 23
                more = [*text, *(token for one in ours for token in one.tokens), 3, 4]
                again = settings_of(GREEDY, "ngram", 12, 4)
                assert other.generate(more, again) == session.generate(more, again)
                assert other.counts().reused_tokens == held
    assert accepted


def test_saved_texts(both: Callable[[str], Both], tmp_path: Path) -> None:
    found, rng = both("int4"), np.random.default_rng(1)
    prompt, file = list(range(1, 180)), tmp_path / "saved"
    wanted = settings_of(SAMPLED, "speculative", 20, 4)
    with Bundle(found.folder.path) as bundle, bundle.session() as session, bundle.session() as other:
        text = session.generate(prompt, wanted)
        session.save(file)
        assert file.stat().st_mode & 0o77 == 0
        assert other.restore(file) == len(prompt) + 19
        assert other.generate(prompt, wanted) == text
        assert other.counts().reused_tokens == len(prompt) - 1
        whole = file.read_bytes()
        for at in [0, 9, 17, 25, 33, 41, *rng.integers(len(whole), size=20).tolist()]:
            changed = bytearray(whole)
            changed[at] ^= 1 << int(rng.integers(8))
            (tmp_path / "changed").write_bytes(changed)
            with pytest.raises(Refused, match=r"damaged|not a saved|another version|another model|do not fit"):
                other.restore(tmp_path / "changed")
        for size in (0, 10, 60, len(whole) - 1):
            (tmp_path / "cut").write_bytes(whole[:size])
            with pytest.raises(Refused, match=r"truncated|not a saved|empty"):
                other.restore(tmp_path / "cut")
        assert other.generate(prompt, wanted) == text
        with bundle.session(context=100) as small, pytest.raises(Refused, match="do not fit"):
            small.restore(file)
        with bundle.session(attention=3) as coded, pytest.raises(Refused, match="another model"):
            coded.restore(file)
        with pytest.raises(Refused, match="cannot be written"):
            session.save(tmp_path / "none" / "file")
        with pytest.raises(Refused) as refused:
            session.restore(tmp_path / "none")
        assert refused.value.status == NO_FILE
    assert sorted(one.name for one in tmp_path.iterdir()) == ["changed", "cut", "saved"]


SAVES = """
import sys
from pathlib import Path

from tests.support.c_sessions import Bundle, settings_of

with Bundle(Path(sys.argv[1])) as bundle, bundle.session() as short, bundle.session() as long:
    short.generate(list(range(1, 40)), settings_of(tokens=8))
    long.generate(list(range(1, 180)), settings_of(tokens=8))
    print("ready", flush=True)
    while True:
        for session in (short, long):
            session.save(Path(sys.argv[2]))
"""


@pytest.mark.nightly
def test_killed_while_it_saves(both: Callable[[str], Both], tmp_path: Path) -> None:
    """The file holds one text or the other, whole, and the next save replaces it."""
    found, rng, file = both("int4"), np.random.default_rng(5), tmp_path / "saved"
    seen = set()
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for _ in range(12):
            command = [sys.executable, "-c", SAVES, str(found.folder.path), str(file)]
            running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.002, 0.03))
            running.kill()
            running.wait()
            running.stdout.close()
            if file.exists():
                seen.add(session.restore(file))
    assert seen == {39 + 7, 179 + 7}
    assert [one.name for one in tmp_path.iterdir() if one != file] in ([], ["saved.part"])


def stopped(session: Session, prompt: Sequence[int], wanted: Settings, point: int) -> tuple[list[int], list[int]]:
    """Write a text that is cancelled where its session asks for the n-th time whether to go on, and goes on.

    Returns:
        Its tokens, and the statuses that its calls failed with.
    """
    session.generate([9], settings_of(method=wanted.method.decode(), tokens=2))  # the last text is another one
    tokens, failed, asked, begun = list[int](), list[int](), count(1), False
    wanted.progress = PROGRESS(lambda user, done, of: next(asked) == point)
    while True:
        try:
            if not begun:
                session.begin(prompt, wanted)
                begun = True
            found = session.next()
        except Refused as refused:
            failed.append(refused.status)
            continue
        tokens += found.tokens
        if found.finish is not None:
            assert session.counts().dropped == b""
            return tokens, failed


@pytest.mark.parametrize("name", ["int4", *DRAFTERS])
def test_cancelled_at_every_point(both: Callable[[str], Both], name: str) -> None:
    """Wherever a text is cancelled, also while it or a draft reads the prompt, it goes on as if it had not been."""
    found = both(name)
    prompt = [token % found.target.vocab_size for token in [*range(1, 160)] * 2]
    everything = ",".join(one for one in found.singles if one != PLAIN)
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for method in (*found.singles, everything):
            wanted = settings_of(SAMPLED, method, 12, 4, nodes=NODES)
            whole, _ = stopped(session, prompt, wanted, 0)
            for point in count(1):
                tokens, failed = stopped(session, prompt, wanted, point)
                assert tokens == whole, (method, point)
                assert failed in ([], [CANCELLED]), (method, point)
                if not failed:
                    break
            assert point > 3


def test_what_was_read_before_a_cancellation_is_kept(both: Callable[[str], Both]) -> None:
    found, prompt = both("int4"), [*range(1, 160)] * 2
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for method in METHODS:
            wanted = settings_of(SAMPLED, method, 12, 4)
            whole = session.generate(prompt, wanted)
            for point in range(4):
                session.generate([9], settings_of(tokens=1))  # another text
                held = min(128 * point, len(prompt) - 1)
                stop = PROGRESS(lambda user, done, of, held=held: done >= held)
                stopping = settings_of(SAMPLED, method, 12, 4, progress=stop)
                with pytest.raises(Refused) as refused:
                    session.begin(prompt, stopping)
                assert refused.value.status == CANCELLED
                session.begin(prompt, wanted)
                assert session.counts().reused_tokens == held
            for point in range(1, len(whole)):
                tokens: list[int] = []

                def enough(one: RoundFound) -> int:
                    tokens.extend(one.tokens)  # noqa: B023 (called at once)
                    return len(tokens) >= point  # noqa: B023

                with pytest.raises(Refused) as refused:
                    session.generate(prompt, wanted, enough)
                assert refused.value.status == CANCELLED
                assert tokens == whole[: len(tokens)]
                while len(tokens) < len(whole):  # the text continues
                    session.cancel()
                    with pytest.raises(Refused):
                        session.next()
                    tokens += session.next().tokens
                assert tokens == whole


def test_cancelled_from_another_thread(both: Callable[[str], Both]) -> None:
    found = both("int4")
    with Bundle(found.folder.path) as bundle, bundle.session() as session, ThreadPoolExecutor(1) as pool:
        wanted = settings_of(tokens=400)
        running = pool.submit(session.generate, [1, 2, 3], wanted, lambda one: session.cancel() or 0)
        with pytest.raises(Refused) as refused:
            running.result()
        assert refused.value.status == CANCELLED


def test_eight_sessions_over_one_bundle(both: Callable[[str], Both]) -> None:
    found = both("int4")
    prompts = [list(range(at, at + 30)) for at in range(1, 9)]
    wanted = [settings_of(SAMPLED, METHODS[at % len(METHODS)], 24, 5) for at in range(8)]
    with Bundle(found.folder.path, threads=2) as bundle:
        sessions = [bundle.session() for _ in prompts]
        bundle.close()  # its sessions keep it
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(Session.generate, sessions, prompts, wanted))
        for session in sessions:
            session.close()
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == found.plain(prompt, SAMPLED, 24)


class Parity:
    """A grammar of no language: tokens must be even after an odd sum of the last two, and small after a small one."""

    scored = False

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def allowed(self, prefix: Sequence[int], row: np.ndarray | None = None) -> np.ndarray:
        last, before = prefix[-1], prefix[max(len(prefix) - 2, 0)]
        tokens = np.arange(self.vocab)
        found = tokens % 2 == 0 if (last + before) % 2 else np.ones(self.vocab, bool)
        return found & (tokens < self.vocab // 3) if last < self.vocab // 2 else found

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        return []

    def mask(self) -> Any:
        def told(user: Any, text: Any, count: int, path: Any, length: int, row: Any, columns: int, out: Any) -> int:
            prefix = [*text[max(count - 2, 0) : count], *path[:length]]
            found = self.allowed(prefix)[:columns]
            np.ctypeslib.as_array(out, (columns,))[:] = found
            return 0

        return MASK(told)


def test_a_mask_of_tokens(both: Callable[[str], Both]) -> None:
    found, accepted = both("int4"), 0
    parity = Parity(found.target.vocab_size)
    for prompt, _ in random_texts(3, 31, found.target.vocab_size):
        for base in (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection", repetition_penalty=1.2)):
            for method in METHODS:
                params = replace(base, constraint=parity)
                theirs = found.python(prompt, params, method, 4, 16)
                wanted = settings_of(params, method, 16, 4, mask=parity.mask(), nodes=NODES)
                assert found.session.rounds(prompt, wanted) == theirs
                accepted += sum(one.accepted for one in theirs)
    assert accepted
    stop = MASK(lambda *given: 1)
    with pytest.raises(Refused) as refused:
        found.session.generate([1, 2], settings_of(mask=stop))
    assert refused.value.status == CANCELLED


def test_log_probabilities(both: Callable[[str], Both]) -> None:
    found = both("int4")
    for prompt, _ in random_texts(2, 37, found.target.vocab_size):
        for params in (GREEDY, replace(SAMPLED, logit_bias={4: 2.0})):
            options = DecodeOptions(16, 4, sampling=replace(params, prompt=len(prompt)), logprobs=True, top_logprobs=5)
            found.target.follow([])
            theirs = list(decode(found.target, found.drafter("speculative"), prompt, options))
            ours = found.session.rounds(prompt, settings_of(params, "speculative", 16, 4, logprobs=1, top_logprobs=5))
            for one, other in zip(ours, theirs, strict=True):
                assert one.tokens == other.tokens
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
                assert one.top is not None
                for likely, expected in zip(one.top, other.top_logprobs, strict=True):
                    assert [token for token, _ in likely] == [token for token, _ in expected]
                    assert [value for _, value in likely] == pytest.approx([value for _, value in expected], abs=1e-6)


def test_a_text_goes_on_after_a_refused_one(both: Callable[[str], Both], tmp_path: Path) -> None:
    """A call that is refused has changed nothing: the text that was begun continues."""
    found = both("int4")
    vocab = found.target.vocab_size
    bad: tuple[tuple[list[int], dict[str, Any]], ...] = (
        ([], {}), ([vocab], {}), ([1] * (found.target.context + 1), {}), ([1], {"method": "?"}),
        ([1], {"method": "ngram,ngram"}), ([1], {"method": "ngram,auto"}), ([1], {"method": "dspark"}),
        ([1], {"branch": (8, 9)}), ([1], {"tokens": -1}), ([1], {"guesses": 65}), ([1], {"prediction": [-1]}),
        ([1], {"adapter": 1}), ([1], {"top_logprobs": 21}), ([1], {"stop_texts": ["a"]}), ([1], {"top_p": 2.0}),
        ([1], {"nodes": 65}), ([1], {"cycles": -1}), ([1], {"params": SamplingParams(logit_bias={vocab: 1.0})}),
    )  # fmt: skip
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for method in (*found.singles, AUTO):
            prompt, wanted = [1, 2, 3] * 5, settings_of(SAMPLED, method, 60, fixed=int(method != AUTO))
            whole = session.generate(prompt, wanted)
            session.begin(prompt, wanted)
            tokens = session.next().tokens
            for other, more in bad:
                with pytest.raises(Refused):
                    session.begin(other, settings_of(**more))
                with pytest.raises(Refused):
                    session.generate(other, settings_of(**more))
                with pytest.raises(Refused):
                    session.restore(tmp_path / "none")
                if len(tokens) < len(whole):
                    tokens += session.next().tokens
            while len(tokens) < len(whole):
                tokens += session.next().tokens
            assert tokens == whole
            assert session.counts().tokens == len(whole)


def test_what_does_not_fit_is_refused(both: Callable[[str], Both], tmp_path: Path) -> None:
    found = both("int4")
    vocab = found.target.vocab_size
    bad: tuple[tuple[list[int], dict[str, Any], str], ...] = (
        ([], {}, "at least one token"),
        ([vocab], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"method": "swift"}, "expected one of this bundle: auto, plain, ngram"),
        ([1], {"method": "ngram,,plain"}, "expected one of this bundle: auto, plain, ngram"),
        ([1], {"method": "ngram,plain,ngram"}, "each one once"),
        ([1], {"method": "ngram,auto"}, "auto: expected no other method"),
        ([1], {"method": "speculative", "branch": (8, 9)}, "at most 64 guesses"),
        ([1], {"tokens": -1}, "max_new_tokens"),
        ([1], {"guesses": 65}, "guesses"),
    )
    with Bundle(found.folder.path) as bundle, bundle.session() as session:
        for prompt, more, words in bad:
            with pytest.raises(Refused, match=words) as refused:
                session.begin(prompt, settings_of(**more))
            assert refused.value.status == REFUSED
            with pytest.raises(Refused, match="that was begun"):
                session.next()
        for name, value in (("temperature", -1.0), ("temperature", math.nan), ("top_p", 1.5), ("min_p", math.nan),
                            ("repetition_penalty", 1e-9), ("presence_penalty", 3.0), ("top_k", -1)):  # fmt: skip
            wanted = settings_of()
            setattr(wanted, name, value)
            with pytest.raises(Refused, match=name):
                session.begin([1], wanted)
        with pytest.raises(Refused, match="bias of token"):
            session.begin([1], settings_of(SamplingParams(logit_bias={vocab: 1.0})))
        session.generate([1], settings_of(tokens=1))
        with pytest.raises(Refused, match="has ended"):
            session.next()
    for path, status in ((tmp_path, NO_FILE), (tmp_path / "none", NO_FILE)):
        with pytest.raises(Refused) as refused:
            Bundle(path)
        assert refused.value.status == status
    for text, words in (("{", "not JSON"), ('{"schema_version": 99}', "schema 99"), ("[1] 2", "not JSON"),
                        ('{"schema_version": 6, "target": {}}', "no graph of native operators")):  # fmt: skip
        (tmp_path / "edgespec.json").write_text(text, "utf-8")
        with pytest.raises(Refused, match=words):
            Bundle(tmp_path)


def test_no_manifest_ends_the_process(both: Callable[[str], Both], tmp_path: Path) -> None:
    """Whatever a manifest says, it is refused with a reason, or a text can be decoded."""
    found, rng = both("int4"), np.random.default_rng(5)
    data = with_costs(found, tmp_path / "made", rng)
    whole, odd = json.dumps(data), ("-1", "1e999", "null", "[]", "{}", '"x"', "9" * 30, "true", "0.5", "4294967296")
    numbers = [match.span() for match in re.finditer(r"(?<=[ \[])-?\d+(\.\d+)?(?=[,\]}])", whole)]
    opened, refused = 0, list[Refused]()
    for turn in range(200):
        if turn % 2:  # another value
            start, end = numbers[int(rng.integers(len(numbers)))]
            text = whole[:start] + odd[int(rng.integers(len(odd)))] + whole[end:]
        else:  # bytes
            at = int(rng.integers(len(whole)))
            text = whole[:at] + chr(int(rng.integers(32, 127))) + whole[at + int(rng.integers(1, 3)) :]
        (tmp_path / "made" / MANIFEST).write_text(text, "utf-8")
        try:
            with Bundle(tmp_path / "made") as bundle, bundle.session(context=64) as session:
                session.generate([1, 2], settings_of(method="ngram,self-spec,speculative", tokens=4, fixed=0))
            opened += 1
        except Refused as error:
            refused.append(error)
    assert opened > 20
    assert len(refused) > 20
    assert {error.status for error in refused} <= {REFUSED, NO_FILE, NO_MEMORY}
    assert all(str(error).startswith("edgespec: ") for error in refused)


def test_every_method_of_python_runs_or_is_named(both: Callable[[str], Both]) -> None:
    """All methods that both have are compared above, and no other one is refused without saying what to use."""
    run = {one for name in (*FORMS, *DRAFTERS) for one in both(name).singles}
    assert run == {one for several in METHODS for one in several.split(",")} | {*DRAFTERS.values()}
    for name in (*FORMS, *DRAFTERS):
        found = both(name)
        for method in {*METHODS_OF_PYTHON, CHAIN} - {AR, *found.singles}:
            words = "expected one of this bundle" if method in run else "runs in Python alone: use "
            with pytest.raises(Refused, match=f"^edgespec: method {method}: .*{words}"):
                found.session.begin([1], settings_of(method=method))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*FORMS, *DRAFTERS])
def test_thousands_of_random_texts(both: Callable[[str], Both], name: str) -> None:
    """Texts are new, continue the one before, or begin as it does."""
    found, drawn, text = both(name), set[str](), list[int]()
    for at, (new, rng) in enumerate(random_texts(5000 // len([*FORMS, *DRAFTERS]) + 1, 29, found.target.vocab_size)):
        base = (GREEDY, SAMPLED, *HOSTILE)[int(rng.integers(2 + len(HOSTILE)))]
        params = replace(base, seed=at, acceptance="coupled" if rng.integers(2) else "rejection")
        method, guesses, tokens = random_methods(found, rng), int(rng.integers(1, 9)), int(rng.integers(1, 33))
        prompt = (new, [*text, *new], [*text[: len(text) // 2], *new])[at % 3]
        rounds = found.compare(prompt, params, method, guesses, tokens)
        drawn |= {*method.split(",")}
        text = [*prompt, *(token for one in rounds for token in one.tokens)][:200]
        if at % 4 == 0 and (params.greedy or params.acceptance == "coupled"):  # with control, which looks at a clock
            wanted = settings_of(params, AUTO if at % 8 else method, tokens, fixed=0, nodes=NODES)
            assert found.session.generate(prompt, wanted) == text[len(prompt) :] or len(text) == 200
            assert found.session.counts().dropped == b""
    assert drawn == {*found.singles}


@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", [SANITIZED, THREADS], ids=["memory", "threads"])
def test_sessions_under_sanitizers(both: Callable[[str], Both], tmp_path: Path, sanitizer: tuple[str, ...]) -> None:
    """Eight sessions over one bundle, for every method and all of them in turn."""
    compiler = host_compiler()
    assert compiler, "no C++ compiler"
    flags = (*PLAIN_FLAGS, *sanitizer)
    names = (*OPERATOR, *READERS, *LOOP, "texts_at_once")
    objects = compiled(tmp_path / "objects", compiler, names, (), flags)  # kernels have their own tests
    program = linked(tmp_path / "program", compiler, objects, flags)
    for name in ("int8", *DRAFTERS):
        found = both(name)
        methods = [*methods_of(found.session), ",".join(one for one in found.singles if one != PLAIN)]
        for first in range(0, len(methods), 8):
            said = program.run(str(found.folder.path), "8", "40", *methods[first : first + 8])
            assert said == "0 of 8 texts differ\n", name


def test_the_example_writes_the_tokens_of_python(bundles: Callable[..., Path], engines: Callable[..., Engine],
                                                 tmp_path: Path) -> None:  # fmt: skip
    need("cc", "to build the example")
    engine, library = engines("native"), native_library().path
    assert library is not None
    source = NATIVE.parents[1] / "examples" / "c" / "generate.c"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{NATIVE}"]
    linking = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(tmp_path / "generate")]
    subprocess.run(["cc", *flags, str(source), *linking], check=True, timeout=300)
    for prompt in map(engine.codec.encode, PROMPTS[::4]):
        command = [str(tmp_path / "generate"), str(engine.bundle.path), "48", *map(str, prompt)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert [*map(int, done.stdout.split())] == engine.generate(prompt, method="ar", max_new_tokens=48).tokens
    done = subprocess.run([str(tmp_path / "generate"), str(tmp_path), "4", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "\n")
    assert "edgespec.json" in done.stderr


def test_vectors(tmp_path: Path) -> None:
    compiler = host_compiler()
    assert compiler, "no C++ compiler"
    names = ("mapping", "sampling", "verify", "ngram", "json", "decoding_vectors")
    program = linked(
        tmp_path / "program", compiler, compiled(tmp_path / "objects", compiler, names, (), SANITIZED), SANITIZED
    )
    for name in ("noise", "sampling", "verify", "ngram"):
        text = (Path(__file__).parents[2] / "vectors" / f"{name}.json").read_text("utf-8")
        (tmp_path / f"{name}.json").write_text(text.replace("-Infinity", "-1e300"), "utf-8")
    assert program.run(str(tmp_path)).startswith("0 of ")
