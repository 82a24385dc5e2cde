"""Requests that decode: what they remember, and which entries leave."""
