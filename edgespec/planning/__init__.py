"""Predict bytes and seconds of a run before anything is loaded, and choose a run within a budget."""
