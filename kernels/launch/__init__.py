"""How kernels are launched: tile sizes, and choices measured on a GPU."""
