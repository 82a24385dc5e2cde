"""The error for operators. Imports nothing: the entry point needs it when all else fails."""


class Refused(Exception):
    """What was asked for cannot be served; the message is for the operator and says why."""
