"""Trees to programs: what names mean, whether types fit."""
