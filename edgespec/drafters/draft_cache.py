"""KV cache of a drafter that reads the target's hidden states, and sampling of its draft tokens.

Three kinds: a row for every token except the first (EAGLE-3; P-EAGLE; layers for multi-token prediction), a row for
every token and a block of draft tokens in one pass (DFlash; DFlash 2 and DSpark, which choose or correct each of them
by the one before), and no rows, because the
drafter reads the target's keys and values (assistants of Gemma 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.proposal import Proposal
from edgespec.decoding.target import Ids, Output, Pass, Target, common_prefix
from edgespec.drafters.sampling_drafts import Draw, Rows, draw_chain, draw_tree, spread
from edgespec.formulas.cost import CostModel
from edgespec.runtimes.files.bundle import read_confidence, read_masked, read_selector
from edgespec.runtimes.files.manifest import EMBEDDING, MARKOV, DecoderPart
from edgespec.runtimes.slots.slot import Slot

FIRST_ROWS = 3  # of the first step that is timed: the pending token and two accepted guesses
TRIED = 6  # of the pass of ``ParallelCache`` that is timed
UNNAMED = -1  # a row that is not known to be of the text
EMBEDDING_BYTES = 1 << 20  # that are kept: asking the target for some takes as long as a small drafter's step


class Embedding(Protocol):
    """Token embeddings: the target's, or those of a drafter that has its own."""

    def embed(self, tokens: Ids) -> Rows:
        """Look up tokens [n] -> [n, hidden]."""
        ...


class InputRows:
    """Builds a drafter's input rows [n, columns]: token embeddings, ``hidden`` wide, followed by hidden states."""

    def __init__(self, embedding: Embedding, columns: int, hidden: int) -> None:
        self.embedding, self.columns, self.hidden = embedding, columns, hidden
        self._token_embeddings: dict[int, Rows] = {}  # [hidden] of each token asked for lately

    def __call__(self, tokens: Sequence[int], state: Rows) -> Rows:
        """Build the rows of tokens [n] and hidden states [n, any] -> [n, columns]."""
        rows = np.zeros((len(tokens), self.columns), np.float32)
        hidden, known = self.hidden, self._token_embeddings
        if 4 * hidden * (len(known) + len(tokens)) > EMBEDDING_BYTES:
            known.clear()
        if new := [token for token in dict.fromkeys(tokens) if token not in known]:
            known.update(zip(new, self.embedding.embed(np.array(new, np.int64)), strict=True))
        for row, token in zip(rows, tokens, strict=True):
            row[:hidden] = known[token]
        rows[:, hidden : hidden + state.shape[1]] = state
        return rows


class DraftCache:
    """Holds a row for every token but the first, of that token and the target's hidden states at the token before.

    A token of ``slot``, which is the drafter's, names a row: see ``names``.
    """

    deferred_rows = 1  # that are left to the pass that guesses
    at_once = False  # all guesses are made in one step
    borrowed = False  # whether the rows are those of another model
    chooses = False  # it says how many guesses are worth a row

    def __init__(self, target: Target, slot: Slot, branch: tuple[int, ...] = (1,)) -> None:
        assert slot.model.part.decoder is not None
        self.target, self.slot, self.branch = target, slot, branch
        self.decoder: DecoderPart = slot.model.part.decoder
        # width of the target's embedding, which is also that of the target's hidden states for an assistant
        hidden = self.decoder.columns // 2 if self.decoder.reads else slot.model.facts.hidden
        embeds = any(group.kind == EMBEDDING for group in slot.model.part.heads)
        self.embedding: Embedding = slot if embeds else target
        self._inputs = InputRows(self.embedding, self.decoder.columns, hidden)
        self.no_states = np.zeros((0, self.decoder.columns - hidden), np.float32)
        self._states = np.zeros((0, 0), np.float32)  # [1 + n, hidden]: its own, of the last token and of guesses

    def __len__(self) -> int:
        return len(self.slot.tokens)

    def crop(self, rows: int) -> None:
        """Keep the first ``rows`` rows."""
        self.slot.crop(rows)

    def names(self, tokens: Sequence[int]) -> list[int]:
        """Name the rows of a text, including the pending token's, so that rows of equal names are equal.

        A row is named by its own token, and the first one also by the token before it.
        """
        own = list(tokens[self.deferred_rows :])
        if self.deferred_rows and own:
            own[0] |= tokens[0] << 32
        return own

    def kept(self, tokens: Sequence[int]) -> int:
        """Keep the rows of a text but the last, forget the others, and count them."""
        found = common_prefix(self.slot.tokens, self.names(tokens)[:-1])
        self.crop(found)
        return len(self)

    def append(self, tokens: Sequence[int], states: Rows) -> None:
        """Append the rows of tokens [n] and the target's hidden states [n, k * hidden]."""
        self._append_inputs(self._inputs(tokens, states))

    def name(self, tokens: Sequence[int], start: int) -> None:
        """Say that the rows from ``start`` on are those of a text, as the ones before are."""
        named, stop = self.slot.tokens, len(self.slot.tokens) + self.deferred_rows
        if start:
            named[start:] = tokens[start + self.deferred_rows : stop]
        else:
            named[:] = self.names(tokens[:stop])

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        """Append the last rows, and at most ``length`` >= 1 levels of guesses after them.

        ``states``: [n, k * hidden], the target's hidden states that the last n tokens make rows with.
        """

        def run(guess: int | None, best: bool) -> Output:
            tokens, rows = (how.tokens[-len(states) :], states) if guess is None else ([guess], self._states)
            return self._forward(tokens, rows, guess is not None, best)

        def step(guess: int | None) -> Rows:
            output = run(guess, False)
            return self._whole(self._unnormed(output)[-1:])[0]

        def best(guess: int | None) -> tuple[int, float]:
            found = run(guess, True).best
            assert found is not None
            return int(found[0][-1]), float(found[1][-1])

        def level(nodes: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> Rows:
            if nodes[0] < 0 or len(self.branch) == 1:  # one number: only first choices have children
                return step(None if nodes[0] < 0 else guesses[nodes[0]])[None]
            above = np.array(parents, np.int64)
            root = self._states[:1]
            output = self.slot.run(
                Pass(None, above, hidden=True, inputs=self._inputs(guesses, self._states[above + 1]))
            )
            assert output.hidden is not None
            self._states = np.concatenate((root, output.hidden))
            return self._whole(self._unnormed(output)[list(nodes)])

        if self.branch == (1,):
            return draw_chain(step, how, length, choose=best)
        return draw_tree(level, how, self.branch, length)

    def _drawn(self, output: Output, first: int, how: Draw, length: int) -> Proposal:
        """Sample draft tokens from a pass that computed all their rows, from row ``first`` on."""
        if output.best is not None:
            pairs = iter(zip(output.best[0][first:].tolist(), output.best[1][first:].tolist(), strict=True))
            return draw_chain(lambda _: output.logits, how, length, choose=lambda _: next(pairs))
        rows = iter(self._whole(output.logits[first:]))
        return draw_chain(lambda _: next(rows), how, length)

    def try_once(self) -> None:
        """Run one dummy draft step for timing."""
        self._step(self._inputs([0], np.zeros((1, 1), np.float32)), True, True)

    def try_first(self) -> bool:
        """Run a dummy first step of a round, over rows that were accepted; False = it takes what another does."""
        states = np.zeros((FIRST_ROWS, self.no_states.shape[1]), np.float32)
        self._step(self._inputs([0] * FIRST_ROWS, states), False, True)
        return True

    def _unnormed(self, output: Output) -> Rows:
        """Undo the division by the last norm, if a drafter has none (``DecoderPart``): logits [n, columns]."""
        if not self.decoder.fusing.unnormed:
            return output.logits
        assert output.hidden is not None
        rows = output.hidden[-len(output.logits) :]
        return output.logits * np.sqrt(np.square(rows).mean(-1, keepdims=True))

    def _forward(self, tokens: Sequence[int], states: Rows, recycled: bool, best: bool = False) -> Output:
        """Append rows of tokens [n] and the target's or its own hidden states [n, any]; keep the state of the last."""
        output = self._run(self._inputs(tokens, states), recycled, best)
        assert output.hidden is not None
        self._states = output.hidden[-1:].copy()
        return output

    def _run(self, inputs: Rows, recycled: bool, best: bool) -> Output:
        output = self._step(inputs, recycled, best)
        self._append(len(inputs))
        return output

    def _step(self, inputs: Rows, recycled: bool, best: bool) -> Output:
        """Run rows [n, columns] with the drafter's or the target's hidden states -> the output of the last row."""
        return self.slot.run(Pass(None, None, int(best), True, scored=1, inputs=inputs, fused=not recycled))

    def _append(self, rows: int) -> None:
        """Keep the first rows of the pass, which have no names yet."""
        self.slot.keep(range(rows))
        self.slot.tokens[-rows:] = [UNNAMED] * rows

    def _append_inputs(self, inputs: Rows) -> None:
        self.slot.run(Pass(scored=0, read=True, inputs=inputs, fused=True))
        self.slot.tokens[-len(inputs) :] = [UNNAMED] * len(inputs)

    def _whole(self, logits: Rows) -> Rows:
        columns = self.slot.head_tokens
        return spread(logits, slice(logits.shape[1]) if columns is None else columns, self.target.vocab_size)


class BlockCache(DraftCache):
    """Holds a row for every token, computed only from the target's hidden states, and drafts a block per pass.

    DFlash (arXiv 2602.06036).  The draft tokens of a block are independent: each is sampled from its own row.
    """

    deferred_rows = 0
    at_once = True

    @property
    def block(self) -> int:
        """Rows that the drafter was trained with: the pending token and guesses."""
        assert self.decoder.block is not None
        return self.decoder.block

    @property
    def guesses(self) -> int:
        """Maximum number of draft tokens of a block."""
        return self.block - (not self.decoder.anchor)

    def rows(self, length: int) -> int:
        """Count the rows of a block with ``length`` draft tokens."""
        return length + 1

    def _guess_block(self, inputs: Rows, best: bool, hidden: bool = False) -> Output:
        """Run a block [rows, columns] -> the output of the rows that guess: all, or all after the first."""
        scored = len(inputs) - (not self.decoder.anchor)
        return self.slot.run(Pass(None, None, int(best), hidden, scored=scored, inputs=inputs, block=True))

    def greedy(self, inputs: Rows, pending: int, length: int) -> list[int]:
        """Take the likeliest guesses after a pending token, of a block with these rows [rows, columns]."""
        return _likeliest(self._guess_block(inputs, True))[:length]

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        if len(states):
            self.append((), states)
        length = min(length, self.guesses)
        inputs = self._masked(how.tokens[-1], length)
        return self._drawn(self._guess_block(inputs, how.params.plain_greedy), 0, how, length)

    def append(self, tokens: Sequence[int], states: Rows) -> None:
        inputs = np.zeros((len(states), self._inputs.columns), np.float32)
        inputs[:, self._inputs.columns - states.shape[1] :] = states
        self._append_inputs(inputs)

    def try_once(self) -> None:
        self._guess_block(self._masked(0, self.guesses), True)

    def try_first(self) -> bool:
        known = len(self)
        self.append((), np.zeros((FIRST_ROWS, self.no_states.shape[1]), np.float32))
        self.try_once()
        self.crop(known)
        return True

    def _masked(self, pending: int, length: int) -> Rows:
        """Build the rows of a block: the pending token, and masks where guesses will be -> [rows, columns]."""
        assert self.decoder.mask is not None
        rows = [pending] + [self.decoder.mask] * (self.rows(length) - 1)
        return self._inputs(rows, np.zeros((1, 0), np.float32))


class CorrectedBlockCache(BlockCache):
    """Corrects each draft token of a block by the one before it, and estimates its confidence.

    DSpark (arXiv 2607.05147).  A block always has as many rows as in training.  Its draft tokens end where the next
    one's chance falls below ``threshold``.  Without a threshold they end where the next one is worth less than its row
    of the pass costs.
    """

    def __init__(self, target: Target, slot: Slot) -> None:
        super().__init__(target, slot)
        self._sure = read_confidence(slot.model.folder, slot.model.part)
        self._corrects = any(group.kind == MARKOV for group in slot.model.part.heads)
        self.threshold: float | None = None
        self.costs: CostModel | None = None
        self.chooses = self._sure is not None

    def rows(self, length: int) -> int:
        return self.block

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        if len(states):
            self.append((), states)
        block, pending = self._ran(self._masked(how.tokens[-1], self.guesses)), how.tokens[-1]
        rows = iter(range(self.guesses))

        def step(guess: int | None) -> Rows:
            return self._whole(self._row(block, next(rows), pending if guess is None else guess))[0]

        worth = None if block.sure is None else self._worth(block.sure, how)
        return draw_chain(step, how, min(length, self.guesses), worth=worth)

    def greedy(self, inputs: Rows, pending: int, length: int) -> list[int]:
        block, found, known = self._ran(inputs), [pending], self.slot.head_tokens
        for at in range(length):
            best = int(self._row(block, at, found[-1]).argmax())
            found.append(best if known is None else int(known[best]))
        return found[1:]

    def confidence(self, inputs: Rows, before: Sequence[int]) -> Rows:
        """Give the chances of guesses after tokens ``before`` [n] in a block with these rows -> [n]."""
        sure = self._ran(inputs).sure
        assert sure is not None
        return np.array([self._chance(sure, at, token) for at, token in enumerate(before)], np.float32)

    def _ran(self, inputs: Rows) -> _Block:
        """Run a block; its rows are copied, as what corrects them is another pass."""
        output = self._guess_block(inputs, False, hidden=self._sure is not None)
        if self._sure is None or output.hidden is None:
            return _Block(output.logits.copy(), None)
        x = output.hidden[len(inputs) - len(output.logits) :]
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self._sure[0])
        return _Block(output.logits.copy(), x @ self._sure[1 : 1 + x.shape[1]])

    def _row(self, block: _Block, at: int, before: int) -> Rows:  # [1, columns]
        row = block.logits[at : at + 1]
        if not self._corrects:
            return row
        after = self.slot.run(Pass(np.array([before], np.int64), group=MARKOV)).logits[0]  # [1, columns]
        return row + after

    def _chance(self, sure: Rows, at: int, before: int) -> float:
        """Predict that the guess in a row is accepted if all before it were."""
        assert self._sure is not None
        offset = len(self._sure) - self.slot.model.facts.vocab
        return float(1 / (1 + np.exp(-float(sure[at] + self._sure[offset + before]))))

    def _worth(self, sure: Rows, how: Draw) -> Callable[[int | None], bool]:
        """Decide before each draft token, only from the one before, whether to offer it."""
        costs = self.costs.given() if self.costs and how.params.seeded_rejection else self.costs
        row = (costs.v(self.guesses + 1) - costs.v(1)) / self.guesses if costs else 0.0
        at, reach, expected = 0, 1.0, 1.0

        def worth(guess: int | None) -> bool:
            nonlocal at, reach, expected
            chance = self._chance(sure, at, how.tokens[-1] if guess is None else guess)
            if self.threshold is not None:
                at += 1
                return chance >= self.threshold
            reach *= chance
            price = row * max(1.0, expected / (costs.d(1) + costs.v(1 + at))) if costs else 0.0
            at, expected = at + 1, expected + reach
            return reach >= price

        return worth

    def try_once(self) -> None:
        self.greedy(self._masked(0, self.guesses), 0, self.guesses)


class SelectedBlockCache(BlockCache):
    """Chooses each draft token of a block among the likeliest of its row, by the token before it: DFlash 2."""

    def __init__(self, target: Target, slot: Slot) -> None:
        super().__init__(target, slot)
        part, numbers = slot.model.part, read_selector(slot.model.folder, slot.model.part)
        assert numbers is not None
        assert self.decoder.selector is not None
        hidden, vocab = part.facts.hidden, part.facts.vocab
        self._project = numbers[:hidden].astype(np.float32)  # [hidden, rank]
        self._before, self._after = numbers[hidden : hidden + vocab], numbers[hidden + vocab :]  # [vocab, rank] both
        self._candidates, self._eps = self.decoder.selector.candidates, self.decoder.selector.eps

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        if len(states):
            self.append((), states)
        length, pending = min(length, self.guesses), how.tokens[-1]
        block = self._ran(self._masked(pending, length))
        rows = iter(range(length))

        def step(guess: int | None) -> Rows:
            ids, scores = self._scored(block, next(rows), pending if guess is None else guess)
            return spread(scores[None], ids, self.target.vocab_size)[0]

        return draw_chain(step, how, length)

    def greedy(self, inputs: Rows, pending: int, length: int) -> list[int]:
        block, found = self._ran(inputs), [pending]
        for at in range(length):
            ids, scores = self._scored(block, at, found[-1])
            found.append(int(ids[scores.argmax()]))
        return found[1:]

    def try_once(self) -> None:
        self.greedy(self._masked(0, self.guesses), 0, self.guesses)

    def _ran(self, inputs: Rows) -> _Selected:
        output = self._guess_block(inputs, False, hidden=True)
        assert output.hidden is not None
        x = output.hidden[len(inputs) - len(output.logits) :]
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self._eps))
        count = min(self._candidates, output.logits.shape[1])
        best = np.argpartition(output.logits, -count, -1)[:, -count:]
        columns = np.sort(best, -1)  # the first of equal ones wins, as in the other methods
        logits, known = np.take_along_axis(output.logits, columns, -1), self.slot.head_tokens
        return _Selected(columns if known is None else known[columns], logits, x @ self._project)

    def _scored(self, block: _Selected, at: int, before: int) -> tuple[NDArray[np.int64], Rows]:
        """Score the candidates of a row after a token -> their ids [candidates], and scores."""
        ids = block.ids[at]
        pair = self._before[before].astype(np.float32) * block.rows[at]
        return ids, block.logits[at] + self._after[ids].astype(np.float32) @ pair


class _Selected(NamedTuple):
    """Candidates of a block, by row: ids and logits [guesses, candidates]; projected rows [guesses, rank]."""

    ids: NDArray[np.int64]
    logits: Rows
    rows: Rows


def _likeliest(output: Output) -> list[int]:
    assert output.best is not None
    guesses: list[int] = output.best[0].tolist()
    return guesses


class _Block(NamedTuple):
    """Output of a pass over a block: logits [guesses, columns]; terms of rows in the confidence, [guesses]."""

    logits: Rows
    sure: Rows | None


class ParallelCache(DraftCache):
    """Drafts all tokens in the pass over the last rows: P-EAGLE (arXiv 2602.01469).

    The pending token's row is followed by rows of a mask token; each sees those before it, and none is kept.
    """

    at_once = True

    def __init__(self, target: Target, slot: Slot) -> None:
        super().__init__(target, slot)
        masked = read_masked(slot.model.folder, slot.model.part)
        assert masked is not None
        self._masked = masked[None]  # [1, k * hidden]

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        inputs = self._inputs(how.tokens[-len(states) :], states)
        return self._drawn(self._guess(inputs, length, how.params.plain_greedy), -length, how, length)

    def greedy(self, inputs: Rows, length: int) -> list[int]:
        """Append rows [n, columns] -> the likeliest guesses after the last of them."""
        return _likeliest(self._guess(inputs, length, True))[-length:]

    def _guess(self, inputs: Rows, length: int, best: bool) -> Output:
        """Append rows [n, columns], and give what they and ``length`` - 1 rows of masks say."""
        assert self.decoder.mask is not None
        masks = np.repeat(self._inputs([self.decoder.mask], self._masked), length - 1, 0)
        rows = np.concatenate((inputs, masks))
        output = self.slot.run(Pass(None, None, int(best), True, inputs=rows, fused=True))
        self._append(len(inputs))
        return output

    def try_once(self) -> None:
        self._step(self._inputs([0] * TRIED, np.repeat(self._masked, TRIED, 0)), False, True)

    def try_first(self) -> bool:
        return False  # accepted rows are in the same pass


class BorrowedCache(DraftCache):
    """Reads the target's KV cache instead of keeping one: each step sees all tokens except the pending one.

    For Gemma 4's assistants.  A round's first step reads only the last row of the target's hidden states.
    """

    borrowed = True
    _rows = 1  # of the target's tokens that are seen

    def __len__(self) -> int:
        return self.slot.context  # the target has computed them at every point where this is asked

    def crop(self, rows: int) -> None: ...

    def kept(self, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1 - self.deferred_rows, 0)

    def name(self, tokens: Sequence[int], start: int) -> None: ...

    def append(self, tokens: Sequence[int], states: Rows) -> None: ...

    def draw(self, states: Rows, how: Draw, length: int) -> Proposal:
        self._rows = len(how.tokens) - 1
        return super().draw(states[-1:], how, length)

    def try_once(self) -> None:
        self._rows = max(1, len(self._lender.tokens))
        self._forward([0], np.zeros((1, 1), np.float32), True, True)

    def try_first(self) -> bool:
        return False  # it has no rows to make

    def _run(self, inputs: Rows, recycled: bool, best: bool) -> Output:
        return borrowed_step(self.slot, self._lender, self._rows, inputs, recycled, best)

    @property
    def _lender(self) -> Slot:
        assert isinstance(self.target, Slot)
        return self.target


def borrowed_step(slot: Slot, lender: Slot, rows: int, inputs: Rows, recycled: bool, best: bool) -> Output:
    """Run a row [1, columns] after the first ``rows`` tokens of the target's slot, which has no pending rows."""
    seen = np.array([rows], np.int64)
    return slot.run(
        Pass(None, None, int(best), True, scored=1, visible=seen, inputs=inputs, fused=not recycled, of=lender)
    )


def draft_cache_of(target: Target, slot: Slot, branch: tuple[int, ...] = (1,)) -> DraftCache:
    """Choose the cache for a hidden-state drafter, by what its part of the manifest says."""
    decoder = slot.model.part.decoder
    assert decoder is not None
    if decoder.reads:
        return BorrowedCache(target, slot)
    if decoder.masked:
        return ParallelCache(target, slot)
    if decoder.selector is not None:
        return SelectedBlockCache(target, slot)
    if decoder.kind == "dspark":
        return CorrectedBlockCache(target, slot)
    return BlockCache(target, slot) if decoder.block else DraftCache(target, slot, branch)
