"""Describe a model in a bundle's manifest, and write the bundle atomically."""
