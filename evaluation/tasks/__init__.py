"""The tasks of `kvpolicy eval`, one file each."""
