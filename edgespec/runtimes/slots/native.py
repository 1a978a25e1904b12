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
from edgespec.runtimes.files.formats import LONGEST_PASS, STATE_ROWS
from edgespec.runtimes.files.manifest import MARKOV
from edgespec.runtimes.files.session_file import fill
from edgespec.runtimes.slots.memory import Memory
from edgespec.runtimes.slots.native_runner import PARENT, PLACE, POSITION, SLOT, VISIBLE, NativeRunner
from edgespec.runtimes.slots.slot import Slot, depths_of


class NativeSlot(NativeRunner):
    """A slot for the graph of native operators; see ``open_slot``."""

    exact_trees = True

    # -- the Target contract ---------------------------------------------------------------------------------------

    def crop(self, length: int) -> int:
        del self.tokens[length:]
        same = len(self.tokens)
        if self._turns is not None:
            self._turns.crop(same)
        if self._lost(same):
            self._marks.add(same)  # what was gone back to once is likely to be gone back to again
            same = self._restart(same)
        elif self._checkpoints:
            self._checkpoints.crop(same)
        self._certain = same
        return same

    def cropped(self, length: int) -> int:
        same = min(length, len(self.tokens))
        if not self._lost(same):
            return same
        kept = self._checkpoints.lengths if self._checkpoints else []
        return max((at for at in kept if at <= same), default=0)

    def _lost(self, same: int) -> bool:
        """Tell whether exact keys or states that rows after ``same`` tokens read are overwritten, or hold more."""
        gone = self.stateful and (self._furthest - same > LONGEST_PASS or same < self._since)
        return bool(gone or (self._held > same).any())

    def mark(self, lengths: Sequence[int], most: int) -> None:
        self._marks = set(lengths)
        if self._checkpoints:
            self._checkpoints.limit(most)

    def taken_up(self) -> bool:
        if (self._held != len(self.tokens)).any():
            self._restart()
            return False
        self.remember()
        return True

    def attend(self, memory: Memory) -> None:
        """Attend over this cross-attention cache from now on; tokens read with another source are forgotten."""
        if not self.attends or memory.of.model is not self.model:
            raise InvalidRequest("a memory of another model, or of one that attends over nothing but its own text")
        memory.hold()
        self.leave()
        self.memory = memory
        if self.beside != memory.digest:
            self.crop(0)
            self.beside = memory.digest

    def leave(self) -> None:
        if self.memory is not None:
            self.memory.release()
        self.memory = None

    def close(self) -> None:
        self.leave()
        super().close()

    def begin_like(self, other: Slot, length: int) -> int:
        assert isinstance(other, NativeSlot)
        if other.beside != self.beside:
            return self.crop(0)
        # tokens that the next pass moves are not in place yet
        same = other.cropped(min([length, *(to for _, _, to in other._moves)]))
        if not same:
            return self.crop(0)
        back = other._lost(same)  # to a checkpoint
        self._copy(other, same, same if back else other.furthest)
        self._since = other._since
        if self._checkpoints and other._checkpoints:
            self._checkpoints.share(other._checkpoints, same)
        return self._restart(same) if back else same

    def _copy(self, other: NativeSlot, tokens: int, furthest: int) -> None:
        """Hold the first tokens of another slot."""
        arrays = self.take_up(other.tokens[:tokens], furthest)
        fill(arrays, other._whole()[: self.kv.nbytes(self.model.facts, tokens)])

    def remember(self) -> None:
        """Keep the states of the text as it is now."""
        if self._checkpoints and not self.revocable and (self._held == len(self.tokens)).all():
            self._settle()
            self._checkpoints.take(self._head, len(self.tokens))

    def end_of_piece(self, tokens: Sequence[int], stop: int) -> int:
        stop = min(stop, len(tokens))
        return self.model.inserted.block_end(tokens, stop) if self._both_ways else stop

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        past = len(self.tokens)
        self.reserve(past + len(tokens))
        marks = [mark - past for mark in self._marks if past < mark <= past + len(tokens)] if self._checkpoints else []
        start = 0
        for stop in sorted(marks):
            yield from super().read(tokens[start:stop], aux_hidden)
            self.remember()
            start = stop
        yield from super().read(tokens[start:], aux_hidden)

    def _move(self, rows: list[tuple[int, int]]) -> None:
        self._moves = [(self.number, at, to) for at, to in rows]

    # -- a pass --------------------------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> Output:
        if wanted.whole and not wanted.aux_hidden:  # what every round of a text asks for needs no check
            assert wanted.tokens is not None
            n = self._place_text(wanted.tokens, wanted.parents)
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
        if wanted.read:
            self._certain = len(self.tokens) + n
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

    def _place_text(
        self, tokens: Ids, parents: Ids | None, offset: int = 0, kept: bool = True, draft: bool = False
    ) -> int:
        """Plan rows [n] after the text, which wait to be ``kept`` if they are no ``draft`` -> n."""
        past, n = len(self.tokens) + offset, len(tokens)
        if kept and n > LONGEST_PASS and self.model.facts.convolutions:
            raise InvalidRequest(f"a pass of {n} rows: expected at most {LONGEST_PASS}", "prefill first")
        plan, above = self._plan(tokens, past), None
        if parents is not None:
            above = parents.tolist()
            plan[PARENT] = parents
            plan[POSITION] = past + depths_of(above)
        if past + n > self._furthest:
            self._furthest = past + n  # kept or not, the rows are in the ring
        if not draft:
            self._pending = (tokens.tolist(), above)
        return n

    def _place(self, wanted: Pass) -> int:
        """Plan the rows of any pass but one of heads or hypotheses -> how many."""
        tokens = self._given(wanted)
        past, n = len(self.tokens) + wanted.offset, len(tokens)
        if wanted.tokens is None and wanted.layers is not None and self.model.facts.layer_embedding:
            raise InvalidRequest("layers of this model look tokens up: expected tokens with the inputs, got none")
        if wanted.inputs is not None:
            self._load(wanted.inputs, n)  # which may refuse them, before anything changes
        if wanted.of is not None:
            self._place_in(wanted.of, wanted.visible)
            return n
        kept = not wanted.draft and wanted.scored != 0
        self._place_text(tokens, wanted.parents, wanted.offset, kept, wanted.draft)
        plan = self._bound["plan"].array
        if wanted.block:
            plan[POSITION], plan[PARENT], plan[VISIBLE] = plan[PLACE], -1, past + n
        if wanted.read and self._both_ways and int(tokens.max(initial=0)) >= INSERTED:
            self._see_blocks(plan, tokens)
        return n

    def _place_in(self, other: Target, visible: Ids | None) -> None:
        """Plan one row after the visible tokens of another slot; its own keys and values are not kept."""
        assert visible is not None
        plan = self._plan(np.zeros(1, np.int64), 0)  # the cache is the other slot's: this one's need not grow
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
        n, past, facts = len(self._given(wanted)), len(self.tokens), self.model.facts
        least = int(wanted.visible.min())
        reach = max(self._furthest, past + n) - least + facts.taps
        behind = facts.delta is not None and (wanted.visible < past).any()
        if behind or (facts.convolutions and (reach > STATE_ROWS or least < self._since)):
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
        n, past = len(tokens), len(self.tokens)
        plan = self._plan(tokens, past)
        if wanted.parents is not None:
            plan[PARENT] = wanted.parents
        plan[VISIBLE] = visible
        plan[POSITION] = visible + depths_of(plan[PARENT].tolist())
        if self._turns is not None:
            self._offsets = self._turns.behind(visible)
        self._furthest = max(self._furthest, past + n)
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

    def _restart(self, most: int = 0) -> int:
        """Forget the text after the last checkpoint of at most ``most`` tokens, or all of it; returns its length."""
        self._held[:] = 0
        left = self._checkpoints.restore(self._head, most) if self._checkpoints else 0
        del self.tokens[left:]
        self._moves, self._furthest, self._certain, self._since = [], left, left, left
        return left

    def _see_blocks(self, plan: Ids, chunk: Ids) -> None:  # [6, n], [n]
        """Let all rows of a part of an image see each other."""
        for start, item, row, count in self.model.inserted.runs(chunk):
            for at in range(count):
                plan[VISIBLE, start + at] = plan[PLACE, start] + item.end_of_block(row + at) - row
                plan[PARENT, start + at] = -1
