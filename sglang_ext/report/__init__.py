"""What is said of requests: facts in answers, metrics, kept positions."""
