"""GGUF files as models."""
