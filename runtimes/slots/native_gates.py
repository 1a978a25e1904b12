"""Where the gates of a native graph stand: two a layer, four for what comes before and after, one a group of heads.

A target whose layers are tapped has one more.  A drafter that is conditioned on it fuses what was tapped with ``embed``
on, and goes on with its own hidden state with ``load`` on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gates:
    """Indices among the gates.

    Attributes:
        layers: of the model; gate 2 i is the attention of layer i, 2 i + 1 its MLP.
        groups: of heads.
        tapped: whether layers are.
    """

    layers: int
    groups: int = 0
    tapped: bool = False

    @property
    def embed(self) -> int:
        """Look tokens up."""
        return 2 * self.layers

    @property
    def load(self) -> int:
        """Begin with the rows of ``hidden_in`` instead."""
        return 2 * self.layers + 1

    @property
    def hidden(self) -> int:
        """Give the residual stream after the last layer."""
        return 2 * self.layers + 2

    @property
    def lm(self) -> int:
        """The model's own final norm and LM head."""
        return 2 * self.layers + 3

    def group(self, number: int) -> int:
        """A group of heads."""
        return 2 * self.layers + 4 + number

    @property
    def taps(self) -> int:
        """Give the residual stream where it is tapped, behind the columns of ``hidden``."""
        return 2 * self.layers + 4 + self.groups

    @property
    def count(self) -> int:
        """How many there are."""
        return 2 * self.layers + 4 + self.groups + self.tapped
