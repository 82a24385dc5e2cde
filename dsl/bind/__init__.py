"""A program for a model and parameter values, and what is proven of it before a prompt."""
