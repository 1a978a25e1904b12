"""Ways to keep keys and values: tables learnt, quality measured."""
