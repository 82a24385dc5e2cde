"""The plugin in a forward: scoring and compressing prompts, decoding, folds, resuming."""
