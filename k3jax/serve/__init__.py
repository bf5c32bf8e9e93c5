"""Batch inference: requests in, completions out, over a fixed number of slots."""
