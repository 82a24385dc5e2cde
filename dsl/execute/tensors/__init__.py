"""Tensors with named axes, the KV heads that are here, and the kernels by name."""
