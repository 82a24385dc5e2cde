"""Experiments on live traffic: who gets which policy, and what it loses against full KV."""
