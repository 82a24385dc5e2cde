"""The errors for operators. Imports nothing: the entry point needs it when all else fails."""


class Refused(Exception):
    """What was asked for cannot be served; the message is for the operator and says why."""


class NotCompiled(Refused):
    """Kernels of a policy cannot be compiled; the log has the traceback."""
