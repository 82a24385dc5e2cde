"""Frames of kernels that a policy's functions complete: what they go over, and what they give."""
