"""Triton source of the parts of a policy that become one kernel."""
