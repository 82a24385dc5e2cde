"""Merging dropped entries into those that stay, and layers stored in pairs."""
