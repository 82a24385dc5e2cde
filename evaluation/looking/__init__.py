"""One prompt or text closely: what was kept of it, how far distributions move."""
