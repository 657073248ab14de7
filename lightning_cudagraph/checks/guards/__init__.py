"""Guards: compare what a graph bakes in with the present, before each replay."""
