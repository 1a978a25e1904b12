"""Drafters conditioned on hidden states: reading published ones, and measuring whether they fit."""
