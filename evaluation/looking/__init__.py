"""A close look at one prompt or text: the entries kept of it, and how far distributions move."""
