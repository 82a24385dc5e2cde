"""Simulated runs: how often an experiment errs, and how long it takes."""
