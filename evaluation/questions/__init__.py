"""Questions: samples of tasks, in two forms, and the judges of answers."""
