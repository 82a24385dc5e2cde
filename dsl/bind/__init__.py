"""A program bound to a model and parameter values, and bounds proven before a prompt is seen."""
