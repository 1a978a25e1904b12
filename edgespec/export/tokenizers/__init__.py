"""Tokenizers of every kind as a tokenizer.json."""
