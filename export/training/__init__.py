"""Training of heads and small draft models for a frozen target; torch, transformers and accelerate are needed here only.

``options``, ``data`` and ``state`` import none of the three, so that mistakes are found before they are loaded.
"""
