"""Frames, kernels that a policy's generated functions complete, and their launches."""
