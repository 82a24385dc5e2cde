"""What dropped entries add to those that stay, and layers stored in pairs."""
