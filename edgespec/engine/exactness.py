"""The two words for a text in strict mode, which all commands and pages use."""

EXACT = "exact"
"""Every row of a pass has the bits that plain decoding gives it, so the text is plain decoding's."""
NEAR_TIES = "near-ties may differ"
"""Rows have other bits in some passes on this machine, so a token may differ where two logits nearly tie."""
