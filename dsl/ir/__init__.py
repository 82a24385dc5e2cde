"""The intermediate representation: nodes, their exact values, and rewriting them."""
