"""Exports: the modules that make a bundle of a model.  ``edgespec.export(model, output)`` is ``front.export``."""
