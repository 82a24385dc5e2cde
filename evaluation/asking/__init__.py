"""Who is asked: policies and budgets, servers and clients, answers that are written down."""
