"""A KV slot over native operators.

One node runs the whole pass.  The plan gives it each row's position, the tokens that the row sees, and the destination
of its key and value.  So a chain, a tree, a draft with layers left out and many hypotheses at once are the same call.
A row has the same bits regardless of the other rows; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgespec.decoding.target import EMBEDDING, Ids, Output, Pass, Target
from edgespec.decoding.text import INSERTED
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.files.manifest import MARKOV
from edgespec.runtimes.files.session_file import fill
from edgespec.runtimes.slots.adapters import ROW
from edgespec.runtimes.slots.books import DRAFT, HYPOTHESES, MUTUAL, READ
from edgespec.runtimes.slots.cross_attention import CrossAttentionCache
from edgespec.runtimes.slots.native_runner import PARENT, PLACE, POSITION, SLOT, VISIBLE, NativeRunner
from edgespec.runtimes.slots.slot import Slot


class NativeSlot(NativeRunner):
    """A slot for the graph of native operators; see ``open_slot``."""

    exact_trees = True

    # -- the Target contract ---------------------------------------------------------------------------------------

    def crop(self, length: int) -> int:
        same = min(length, len(self.tokens))
        left = self._books.crop(same)
        if left < same:
            self._marks.add(same)  # what was gone back to once is likely to be gone back to again
        return self._forget(left)

    def _forget(self, left: int) -> int:
        """Forget the tokens that the books have forgotten."""
        del self.tokens[left:]
        if self._turns is not None:
            self._turns.crop(left)
        return left

    def cropped(self, length: int) -> int:
        return self._books.cropped(length)

    def keep(self, rows: Sequence[int]) -> None:
        count = len(rows)
        if count and rows[-1] != count - 1:  # a path with gaps
            self._books.keep(rows)
            self._may_wait = True
        elif self._books.try_keep(None, count) < 0:
            raise self._books.refusal()
        tokens, self._pending = self._pending[0], ([], None)
        self.tokens.extend([tokens[row] for row in rows])

    def mark(self, lengths: Sequence[int], most: int) -> None:
        self._marks = set(lengths)
        self._books.limit(most)

    def taken_up(self) -> bool:
        if self._books.behind:
            self._restart()
            return False
        self.remember()
        return True

    def _restart(self) -> None:
        self._books.restart()
        self._forget(0)

    def attend(self, memory: CrossAttentionCache) -> None:
        """Attend over this cross-attention cache from now on; tokens read with another source are forgotten."""
        if not self.attends or memory.of.model is not self.model:
            raise InvalidRequest("a memory of another model, or of one that attends over nothing but its own text")
        memory.of.hold(memory)
        self.leave()
        self.memory = memory
        if self.beside != memory.digest:
            self.crop(0)
            self.beside = memory.digest

    def leave(self) -> None:
        if self.memory is not None:
            self.memory.of.release(self.memory)
        self.memory = None

    def close(self) -> None:
        self.leave()
        super().close()

    def copy_prefix_from(self, other: Slot, length: int) -> int:
        assert isinstance(other, NativeSlot)
        if other.beside != self.beside or other.adapter != self.adapter:
            return self.crop(0)
        same = other._books.lends(length)
        if not same:
            return self.crop(0)
        self._copy(other, same)
        return self._forget(self._books.copy_prefix_from(other._books, same))

    def _copy(self, other: NativeSlot, tokens: int) -> None:
        """Hold the first tokens of another slot."""
        arrays = self.take_up(other.tokens[:tokens], tokens)
        fill(arrays, other._whole()[: self.kv.nbytes(self.model.facts, tokens)])

    def remember(self) -> None:
        """Keep the states of the text as it is now."""
        if self._books.has_checkpoints and not self.revocable and not self._books.behind:
            self._settle()
            self._books.checkpoint()

    def end_of_piece(self, tokens: Sequence[int], stop: int) -> int:
        stop = min(stop, len(tokens))
        return self.model.inserted.block_end(tokens, stop) if self._both_ways else stop

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        past = len(self.tokens)
        self.reserve(past + len(tokens))
        marks = [mark - past for mark in self._marks if past < mark <= past + len(tokens)]
        if not self._books.has_checkpoints:
            marks = []
        start = 0
        for stop in sorted(marks):
            yield from super().read(tokens[start:stop], aux_hidden)
            self.remember()
            start = stop
        yield from super().read(tokens[start:], aux_hidden)

    # -- a pass --------------------------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> Output:
        if wanted.whole and not wanted.aux_hidden:  # what every round of a text asks for needs no check
            assert wanted.tokens is not None
            n = len(wanted.tokens)
            self._plan(wanted.tokens, wanted.parents)
            if self._selected is not self._ordinary:
                self._select(*self._ordinary)
            return self._likeliest(self._launch(n, n, top=wanted.top, hidden=wanted.hidden))
        self.check(wanted)
        if wanted.group:
            return self._ask(wanted)
        if wanted.visible is not None and wanted.of is None:
            return self._score(wanted)
        n = self._place(wanted)
        self._choose(wanted)
        coarse = wanted.draft and self.kv.codes is not None
        if coarse:
            self._read_codes(True)
        try:
            output = self._launch(
                n, n if wanted.scored is None else wanted.scored, top=wanted.top, hidden=wanted.hidden,
                aux_hidden=wanted.aux_hidden, read=n if wanted.read else 0,
            )  # fmt: skip
        finally:
            if coarse:
                self._read_codes(False)
        if wanted.read:
            self.keep(range(n))
        if wanted.layers is not None:
            output.share = (wanted.layers[1] - wanted.layers[0]) / self.layers
        return self._likeliest(output)

    def _place(self, wanted: Pass) -> int:
        """Plan the rows of any pass but one of heads or hypotheses -> how many."""
        tokens = self._given(wanted)
        n = len(tokens)
        if wanted.tokens is None and wanted.layers is not None and self.model.facts.layer_embedding:
            raise InvalidRequest("layers of this model look tokens up: expected tokens with the inputs, got none")
        if wanted.inputs is not None:
            self._load(wanted.inputs, n)  # which may refuse them, before anything changes
        if wanted.of is not None:
            self._place_in(wanted.of, wanted.visible)
            return n
        how = DRAFT * wanted.draft + READ * wanted.read + MUTUAL * wanted.block
        plan = self._plan(tokens, wanted.parents, wanted.offset, how)
        if wanted.adapters is not None:
            plan[SLOT] = self.number + ROW * wanted.adapters
        if wanted.read and self._both_ways and int(tokens.max(initial=0)) >= INSERTED:
            self._see_blocks(plan, tokens)
        return n

    def _place_in(self, other: Target, visible: Ids | None) -> None:
        """Plan one row after the visible tokens of another slot; its own keys and values are not kept."""
        assert visible is not None
        plan = self._nowhere(1)  # the cache is the other slot's: this one's need not grow
        self._borrow(other)
        # its place is a token that it sees anyway: nothing is written there
        plan[POSITION], plan[VISIBLE], plan[PLACE], plan[SLOT] = visible, visible, visible - 1, self.number

    def _choose(self, wanted: Pass) -> None:
        """Choose the parts of the model that a pass runs."""
        begin = self._at.embed if wanted.inputs is None or wanted.fused else self._at.load
        if wanted.read and wanted.fused:
            # for a block only keys and values; otherwise the output of the last MLP is not read
            block = bool(self.model.part.decoder and self.model.part.decoder.block)
            self._select(begin, -2, (0, 0) if block else None, last_mlp=False)
        else:
            self._select(begin, -1 if wanted.layers is None or wanted.scored != 0 else -2, wanted.layers, wanted.skip)

    def _ask(self, wanted: Pass) -> Output:
        """Run a group of heads, or look up embeddings; the rows of the last pass may still be kept afterwards."""
        at, top = self._at, wanted.top
        number, count = -1, 1
        if wanted.group != EMBEDDING or self._embeds:
            number, found = self._group(wanted.group)
            count = found.count
        n = len(self._given(wanted))
        plan = self._nowhere(n)
        if wanted.tokens is not None:
            self._name(plan, wanted.tokens)
            plan[POSITION] = np.arange(n)
        if number >= 0:  # it begins with rows, of which those that name tokens read nothing
            self._load(np.zeros((n, self._columns_in), np.float32) if wanted.inputs is None else wanted.inputs, n)
        self._select(at.embed if number < 0 else at.load, -2 if number < 0 else at.heads[number], (0, 0))
        scored = n if wanted.scored is None else wanted.scored
        columns = self.columns if wanted.group == MARKOV else self._head_size
        output = self._launch(n, scored, top=top, hidden=wanted.hidden, times=count, columns=columns)
        output.tokens = self.head_tokens
        if not top:
            output.logits = output.logits.reshape(count, scored, columns)
        else:
            assert output.best is not None
            ids, values = output.best
            if self.head_tokens is not None:  # -1 where more were requested than exist
                ids = np.where(ids < 0, -1, self.head_tokens[ids])
            output.best = ids.reshape(count, scored, top), values.reshape(count, scored, top)
        return output

    def _likeliest(self, output: Output) -> Output:
        """Name the only best of each row of a pass as tokens [n]."""
        if output.best is not None:
            ids, values = output.best[0][:, 0], output.best[1][:, 0]
            if self.model.part.cut and self.head_tokens is not None:
                ids = self.head_tokens[ids]
            output.best = ids, values
        return output

    def _nowhere(self, n: int) -> Ids:  # [6, n]
        """Plan rows that no layer runs over."""
        plan = self._attach("plan", (6, n), np.int64)
        plan[:], plan[PARENT] = 0, -1
        self._offsets = 0
        if self.attends:
            self._see(n, 0, 0, None)  # nor does any row attend
        return plan

    # -- for tools: scoring many hypotheses in one pass --------------------------------------------------------------

    def _score(self, wanted: Pass) -> Output:
        """Run rows that each continue some beginning of the text."""
        assert wanted.visible is not None
        n, past = len(self._given(wanted)), len(self.tokens)
        least = int(wanted.visible.min())
        if not self._books.reaches(least, n):
            return self._score_in_turn(wanted)
        if self.kv.ring and past + n - least > LONGEST_PASS:
            raise InvalidRequest(
                f"hypotheses reach {past + n - least} tokens back, but exact recent keys {LONGEST_PASS}",
                "score hypotheses with attention f32, f16 or int8",
            )
        return self._score_here(wanted)

    def _score_here(self, wanted: Pass) -> Output:
        tokens, visible = self._given(wanted), wanted.visible
        assert visible is not None
        n = len(tokens)
        self.model.buffer("plan", (6, n), np.int64).array[VISIBLE] = visible
        self._plan(tokens, wanted.parents, how=HYPOTHESES | DRAFT)
        if self._turns is not None:
            self._offsets = self._turns.behind(visible)
        self._choose(wanted)
        scored = n if wanted.scored is None else wanted.scored
        return self._likeliest(self._launch(n, scored, top=wanted.top, hidden=wanted.hidden))

    def _score_in_turn(self, wanted: Pass) -> Output:
        """Run each row right after the text that it sees, reading the text again: old states are not kept."""
        text, tokens, visible, skip = list(self.tokens), self._given(wanted), wanted.visible, wanted.skip
        assert visible is not None
        parents = np.arange(-1, len(tokens) - 1) if wanted.parents is None else wanted.parents
        self._restart()
        columns = self.columns if skip is None else min(skip.head_rows or self.columns, self.columns)
        logits = np.empty((len(tokens), columns), np.float32)
        hidden = np.empty((len(tokens), self.model.facts.hidden), np.float32) if wanted.hidden else None
        for part in sorted(
            np.split(np.arange(len(tokens)), np.flatnonzero(parents < 0)[1:]), key=lambda at: visible[at[0]]
        ):
            self.prefill(text[len(self.tokens) : int(visible[part[0]])])
            own = np.where(parents[part] < 0, -1, parents[part] - part[0])
            found = self._score_here(wanted._replace(tokens=tokens[part], parents=own, top=0, visible=visible[part]))
            logits[part] = found.logits
            if hidden is not None and found.hidden is not None:
                hidden[part] = found.hidden
        self.prefill(text[len(self.tokens) :])
        return Output(logits, hidden)

    def _see_blocks(self, plan: Ids, chunk: Ids) -> None:  # [6, n], [n]
        """Let all rows of a part of an image see each other."""
        for start, item, row, count in self.model.inserted.runs(chunk):
            for at in range(count):
                plan[VISIBLE, start + at] = plan[PLACE, start] + item.end_of_block(row + at) - row
                plan[PARENT, start + at] = -1
