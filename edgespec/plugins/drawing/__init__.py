"""Image generation: a model whose tokens are the codes of a picture."""
