"""Convert tokenizers of every kind to a tokenizer.json."""
