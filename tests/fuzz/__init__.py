"""Untrusted bundles and sources, mutated by programs that know their structure; see README.md."""
