"""Statistics of arms that are valid at any moment, and of keys."""
