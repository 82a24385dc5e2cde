"""Values at one layer, of other layers and of other ranks; merging and sharing there."""
