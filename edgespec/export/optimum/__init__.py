"""Models whose graphs optimum exported: architectures that edgespec does not emit itself (docs/models.md)."""
