"""ParaDecode (arXiv 2506.03700): early exits whose skipped layers run later, for several tokens at once."""

from edgespec.drafters.registry import Method

# how many tokens take an exit is a model's own, so no gain is assumed
METHOD = Method("early exits", "edgespec.plugins.paradecode.drafter:build", "heads", heads="exit")
