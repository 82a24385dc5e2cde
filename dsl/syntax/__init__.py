"""Text to trees: YAML and expressions with their places, messages, the formatter."""
