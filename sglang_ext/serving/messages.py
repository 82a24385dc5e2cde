"""What the front end asks of schedulers about policies, and the states that they answer."""

from __future__ import annotations

# Actions: of a change of the policies, and to make a variant (variants.py).
PREPARE, LOOK, COMMIT, WITHDRAW, UNDO = "prepare", "look", "commit", "withdraw", "undo"
VARY = "vary"

PREPARING, READY, FAILED, DONE = "preparing", "ready", "failed", "done"

LOOK_EVERY = 0.1  # seconds between two looks whether all schedulers are ready
PATIENCE = 600.0  # seconds for compiling

MOST_VARIANTS = 64  # that a front end takes to be there, those that it asked for last
MOST_PENDING = 8  # that a front end has made at a time; operators' changes wait for them too
