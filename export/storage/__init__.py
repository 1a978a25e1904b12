"""The weight file: planned from shapes, then written."""
