"""The policy language: reading, checking, explaining and executing policy files."""
