"""The intermediate representation: nodes, those that the host evaluates, and rewriting them."""
