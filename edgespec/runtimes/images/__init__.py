"""Read images as a model's input: files and arrays to pixels."""
