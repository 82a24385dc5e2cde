"""Slots and pages of compressed requests, and the tables that describe them on the device."""
