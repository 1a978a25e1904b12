"""Measurements of a bundle's graphs, for its manifest."""
