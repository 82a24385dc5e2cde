"""The front end: which policy each request gets, what clients may ask, what operators change."""
