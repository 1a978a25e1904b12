"""Recipes: what to export for which device, and how to run it; data only (docs/recipes.md)."""
