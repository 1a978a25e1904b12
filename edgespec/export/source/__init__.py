"""The source model, read a tensor at a time."""
