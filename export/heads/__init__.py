"""Trained heads: which, whose, and their matrices."""
