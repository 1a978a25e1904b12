"""What strict mode needs where heads are wider than one piece of the sums of ONNX Runtime's attention."""

from __future__ import annotations

# ONNX Runtime's matrix product (MLAS, sgemm.cpp) sums up to 128 terms in one piece.  Longer sums, as of a query and a
# key of a wide head, are cut at places that follow from the number of columns up to 64, and at every 128 beyond.
WHOLE_SUM, FIXED_FROM = 128, 65


def least_length(head_dim: int) -> int:
    """Fewest tokens, dummies included, that attention over such heads needs for rows of the same bits in every pass."""
    return FIXED_FROM if head_dim > WHOLE_SUM else 0
