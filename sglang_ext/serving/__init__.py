"""The policies of a scheduler: bound at the start, changed at run time, varied by requests."""
