"""A bundle, opened by Python's loop and by the C interface's, whose rounds are compared."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import Auto, Candidate
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.ngram_stores import NGramStore
from edgespec.drafters.registry import AR, AUTO, METHODS, Parts, complete
from edgespec.engine.known import known_rates
from edgespec.engine.methods import LEAST_GAMMA, choose_method
from edgespec.formulas.cost import CostModel
from edgespec.runtimes.files.bundle import Bundle as BundleFolder
from edgespec.runtimes.files.manifest import MANIFEST, Manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support.c_sessions import Bundle, Refused, RoundFound, Session, settings_of

PLAIN = "plain"
NODES = 12  # of a tree of medusa
GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, seed=5, acceptance="coupled")
HOSTILE = (
    SamplingParams(0.0, repetition_penalty=1.7),
    SamplingParams(0.0, logit_bias={3: -math.inf, 7: 4.5, 9: -1e30}),
    SamplingParams(0.0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(0.0, presence_penalty=-2, frequency_penalty=-2, repetition_penalty=1e-6),
    SamplingParams(1e-300),
    SamplingParams(5e-324, top_p=0.5),
    SamplingParams(1e300, top_p=0.9, logit_bias={5: -math.inf}),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.3, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(0.7, top_p=1e-9),
    SamplingParams(2.5, min_p=1.0),
    SamplingParams(0.8, top_p=0.95, repetition_penalty=1e6, presence_penalty=2),
    SamplingParams(1.0, repetition_penalty=0.5, frequency_penalty=-1, logit_bias={2: 8.0}),
)


def methods_of(session: Session) -> tuple[str, ...]:
    """List what a session says that its bundle has: plain decoding, methods, and auto."""
    with pytest.raises(Refused, match="expected one of this bundle: ") as refused:
        session.begin([1], settings_of(method="?"))
    found = str(refused.value).rpartition(": ")[2].split(", ")
    assert {PLAIN, AUTO} <= {*found}
    return tuple(found)


@dataclass
class Both:
    """A bundle and its parts; ``cycles``: of blockwise; ``branch``: of trees."""

    folder: BundleFolder
    target: Slot
    bundle: Bundle
    session: Session
    manifest: Manifest
    store: NGramStore | None = None
    cycles: int = 0
    drafters: dict[object, Drafter] = field(default_factory=dict)  # kept from text to text, as an engine does
    drafts: dict[str, Slot] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Both:
        folder, bundle = BundleFolder.open(path), Bundle(path)
        target = open_slot(Model(path, folder.manifest.target, "native", 1))
        return cls(folder, target, bundle, bundle.session(), complete(folder.manifest))

    def close(self) -> None:
        self.session.close()
        self.bundle.close()

    @cached_property
    def singles(self) -> tuple[str, ...]:
        """The methods that both have, one at a time."""
        return tuple(name for name in methods_of(self.session) if name != AUTO)

    def draft(self, name: str) -> Slot:
        if name not in self.drafts:
            self.drafts[name] = open_slot(Model(self.folder.path, self.folder.part(name), "native", 1))
        return self.drafts[name]

    def drafter(self, method: str, branch: tuple[int, ...] = (), **options: Any) -> Drafter:
        """Build a method's drafter as an engine does."""
        name = AR if method == PLAIN else method
        wanted = DraftOptions(branch=branch or None, nodes=NODES, cycles=self.cycles, **options)
        key = name, wanted, id(self.store), id(self.target), self.manifest.methods[name].model_dump_json()
        if key not in self.drafters:
            parts = Parts(self.folder.path, self.manifest, self.target, self.draft, CostModel, self.store)
            self.drafters[key] = METHODS[name].build(parts, self.manifest.methods[name], wanted)
        return self.drafters[key]

    def python(self, prompt: Sequence[int], params: SamplingParams, method: str, guesses: int, tokens: int,
               stops: Sequence[int] = (), branch: tuple[int, ...] = ()) -> list[RoundFound]:  # fmt: skip
        options = DecodeOptions(tokens, guesses, frozenset(stops), replace(params, prompt=len(prompt)))
        drafters = [self.drafter(one, branch) for one in method.split(",")]
        self.target.follow([])
        rounds = decode(self.target, Policy(drafters), prompt, options)
        return [RoundFound(one.tokens, one.drafted, one.rejected, one.accepted, one.finish) for one in rounds]

    def plain(self, prompt: Sequence[int], params: SamplingParams, tokens: int) -> list[int]:
        """Decode a text in Python without guesses."""
        return [token for one in self.python(prompt, params, PLAIN, 1, tokens) for token in one.tokens]

    def c(self, prompt: Sequence[int], params: SamplingParams, method: str, guesses: int, tokens: int,
          stops: Sequence[int] = (), branch: tuple[int, ...] = ()) -> list[RoundFound]:  # fmt: skip
        wanted = settings_of(params, method, tokens, guesses, stops, branch=branch, nodes=NODES, cycles=self.cycles)
        return self.session.rounds(prompt, wanted)

    def compare(self, *case: Any, **more: Any) -> list[RoundFound]:
        """Compare the rounds of a text -> them."""
        ours = self.c(*case, **more)
        assert self.session.counts().dropped == b"", case
        assert ours == self.python(*case, **more), case
        return ours

    def controlled(self, prompt: Sequence[int], params: SamplingParams, method: str, tokens: int) -> list[RoundFound]:
        """Compare a text whose control looks at no clock: its seed decides it, by rejection -> the rounds."""
        policy, most = self._adaptive(method)
        options = DecodeOptions(tokens, most, sampling=replace(params, prompt=len(prompt)))
        self.target.follow([])
        theirs = list(decode(self.target, policy, prompt, options))
        ours = self.session.rounds(prompt, settings_of(params, method, tokens, fixed=0, nodes=NODES))
        assert self.session.counts().dropped == b""
        expected = [(one.tokens, one.drafted) for one in theirs]
        assert [(one.tokens, one.drafted) for one in ours] == expected, (prompt, params, method)
        return ours

    def _adaptive(self, method: str) -> tuple[Adaptive | Auto, int]:
        """Make Python's policy of methods, and the maximum number of guesses."""
        controls, most = list[Control](), 0
        verify = {int(rows): ms for rows, ms in self.manifest.cost["verify_ms"].items()}
        elsewhere = {*self.manifest.methods} - {*self.singles, AR}
        chosen = {one.name: one.promise for one in choose_method(self.manifest, AUTO, without=elsewhere).candidates}
        for name in list(chosen) if method == AUTO else method.split(","):
            part, drafter = self.manifest.methods[name], self.drafter(name)
            costs = CostModel(verify, *((0.0, None) if drafter.cheap else (part.draft_cost, part.first_cost)))
            gamma = METHODS[name].gamma or max(part.gamma, LEAST_GAMMA)
            controls.append(Control(drafter, costs, gamma, prior=known_rates(name, part)))
            most = max(most, gamma)
        if method != AUTO:
            return Adaptive(controls), most
        candidates = []
        for (name, promise), one in zip(chosen.items(), controls, strict=True):
            needs = METHODS[name].needs
            candidates.append(Candidate(name, promise, partial(_given, one), needs == "text", needs == "drafter"))
        return Auto(candidates), most


def _given(control: Control) -> Control:
    return control


def with_costs(found: Both, made: Path, rng: np.random.Generator) -> dict[str, Any]:
    """Link a bundle's files in another folder, with other measurements in its manifest -> the manifest."""
    shutil.copytree(found.folder.path, made, copy_function=os.link)
    (made / MANIFEST).unlink()
    data: dict[str, Any] = json.loads((found.folder.path / MANIFEST).read_text("utf-8"))
    data["cost"] = {
        "verify_ms": {str(rows): float(ms) for rows, ms in zip((1, 2, 4, 8), rng.uniform(5, 30, 4), strict=True)}
    }
    for name, part in data["methods"].items():
        if METHODS[name].needs == "text":
            continue
        rates, confidence = rng.uniform(0.3, 0.95, 4).tolist(), np.sort(rng.uniform(0.2, 1, 8)).tolist()
        part |= {
            "draft_cost": float(rng.uniform(0.02, 0.7)), "first_cost": float(rng.uniform(0.1, 0.7)),
            "gamma": int(rng.integers(1, 9)), "predicted_speedup": float(rng.uniform(0.9, 2)),
            "measured": [{"acceptance": rates, "confidence": confidence, "positions": int(rng.integers(1, 400)),
                          "text": "t", "text_sha256": "0" * 64}],
        }  # fmt: skip
    (made / MANIFEST).write_text(json.dumps(data), "utf-8")
    return data


def random_texts(count: int, seed: int, vocab: int) -> Iterator[tuple[list[int], np.random.Generator]]:
    """Make prompts of any length, half of them with parts that repeat."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt = rng.integers(vocab, size=int(rng.integers(1, 40))).tolist()
        yield prompt * int(rng.integers(1, 4)), rng


def random_methods(found: Both, rng: np.random.Generator) -> str:
    """Choose one of a bundle's methods, or several that guess in turn."""
    if rng.integers(3):
        return str(rng.choice(found.singles))
    guessing = [name for name in found.singles if name != PLAIN]
    return ",".join(rng.permutation(guessing)[: int(rng.integers(2, 4))])
