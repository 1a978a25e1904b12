"""Quantized checkpoints, read as float32."""
