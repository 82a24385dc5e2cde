"""The cases of kernels.py: calls that do the same work, with the check of their results."""
