"""Text to trees: YAML and expressions, where everything stands, messages, the formatter."""
