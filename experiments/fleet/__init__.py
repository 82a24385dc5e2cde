"""All replicas: asking them, giving them orders, and what they have seen, pooled."""
