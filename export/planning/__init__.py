"""What an export would write, and how large."""
