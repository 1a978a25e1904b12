"""Decoders for edgespec's own operators: emission as a program, and packed weights."""
