"""Attention over ragged lists of entries, for one new token and for many."""
