"""Which method, format and context for a budget: candidates, and the pick with its reason."""

from __future__ import annotations
