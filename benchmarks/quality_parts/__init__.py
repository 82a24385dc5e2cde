"""The parts of quality.py."""
