"""Times of a `fit`: the clocks, and the marks of the parts of a step."""
