"""The torch program: the same as the interpreter, on any device, for servers."""
