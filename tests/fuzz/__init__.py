"""Bundles and sources of strangers, mutated by programs that know their structure; see README.md."""
