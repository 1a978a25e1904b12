"""Levels of weights: calibration and the float32 reference."""
