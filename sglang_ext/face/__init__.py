"""Towards SGLang and the operator: its names, options, what is refused."""
