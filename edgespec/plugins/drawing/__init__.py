"""Image generation: a model whose tokens are the codes of an image."""
