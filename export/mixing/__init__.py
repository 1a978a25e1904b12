"""Four and eight bits in one model."""
