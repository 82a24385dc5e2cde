"""The commands: run, test, diff, explain, show, tune, and the trial before a policy is served."""
