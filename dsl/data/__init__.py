"""What executions are given and what they return."""
