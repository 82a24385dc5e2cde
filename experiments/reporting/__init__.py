"""An experiment on a screen and on a page."""
