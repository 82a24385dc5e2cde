"""Entries of compressed requests: how they lie in pages, and moving them."""
