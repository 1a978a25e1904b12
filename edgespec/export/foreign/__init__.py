"""Models whose graphs come from elsewhere: architectures that edgespec does not emit itself (docs/models.md)."""
