"""Events that are recorded inside a graph and outside, and the clock that reads them."""
