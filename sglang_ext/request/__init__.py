"""One request: what it asks for, its state, its admission, its pending decode steps."""
