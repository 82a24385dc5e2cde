"""How kernels are launched: checks of arguments, tile sizes, and choices measured on a GPU."""
