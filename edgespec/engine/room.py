"""Room for a request's text: one without a length asks for it by pieces, so that what it may never need is free."""

from __future__ import annotations

from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.engine.admission import extend
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import MethodChoice
from edgespec.engine.places import Place
from edgespec.planning.allowance import Admission

BLOCK = 64  # tokens: memory is counted by so many


class Room:
    """What a running request may write.

    Args:
        engine: where it runs.
        choice: its method.
        admission: how it runs.
        place: its memory; ``tokens`` grows.
        settings: of the request.

    Attributes:
        most: most new tokens.
        admission: as given; ``predicted`` is of the tokens that there is room for now.
    """

    def __init__(
        self, engine: LoadedBundle, choice: MethodChoice, admission: Admission, place: Place, settings: Settings
    ) -> None:
        self._choice, self._place, self._settings = choice, place, settings
        self._open = engine.ends_by_itself(settings)
        self.admission = admission
        self.most = settings.max_new_tokens or (engine.context if self._open else MAX_NEW_TOKENS)

    def lasts(self, engine: LoadedBundle, held: int) -> bool:
        """Whether another round has room; more of it is asked for where the text has no length.

        Args:
            engine: where the request runs now.
            held: tokens of prompt and answer so far.
        """
        after = held + (self._settings.gamma or self._choice.gamma) + 1  # the longest round
        if not self._open or self._place.tokens >= engine.context or after <= self._place.tokens:
            return True
        for wanted in (held + max(held // 2, MAX_NEW_TOKENS), -(-after // BLOCK) * BLOCK):
            tokens = min(engine.context, wanted)
            found = extend(engine, self._choice, self.admission, self._place, tokens, self._settings)
            if found is not None:
                self.admission = found
                return True
        return False
