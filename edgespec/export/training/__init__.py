"""Training of heads and small draft models for a frozen target, with torch, transformers and accelerate.

``options``, ``data`` and ``state`` import none of the three, so that mistakes are found before they are loaded.
"""
