"""The definition of what a policy does: numpy, float64, clear over fast."""
