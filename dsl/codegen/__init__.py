"""Triton source for the parts of a policy that generated kernels compute."""
