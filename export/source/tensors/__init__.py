"""Tensors on disk."""
