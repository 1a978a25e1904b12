"""Speech generation: a model whose tokens are the codes of sound."""
