"""One replica: which arm a request gets, what was seen of it, and the verdicts from it."""
