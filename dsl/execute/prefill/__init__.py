"""The prefill of one prompt."""
