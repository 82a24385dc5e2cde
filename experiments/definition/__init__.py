"""What an experiment is, and the file that says it."""
