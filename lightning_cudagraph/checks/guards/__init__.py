"""Guards: what a graph has baked in, compared before each replay."""
