"""Recipes: export options for each device, and options to run the bundle; data only (docs/recipes.md)."""
