"""Which policies are served: bound at the start, changed at run time, varied by requests."""
