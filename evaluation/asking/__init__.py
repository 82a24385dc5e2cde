"""Asking servers: policies and budgets, servers and clients, the files of answers."""
