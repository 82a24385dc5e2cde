"""Choosing a parameter of a policy by what it does to a model on prompts of the user."""
