"""Reports about requests: facts in answers, metrics, kept positions."""
