"""SWIFT (arXiv 2410.06916): self-speculation whose skipped sub-layers are searched while it decodes."""

from edgespec.drafters.registry import Method, Prior

METHOD = Method(
    "the same, layers searched while it writes",
    "edgespec.plugins.swift.drafter:build",
    "layers",
    searches=True,
    prior=Prior(0.70, "SWIFT, arXiv 2410.06916, as measured again in arXiv 2506.03700"),
)
