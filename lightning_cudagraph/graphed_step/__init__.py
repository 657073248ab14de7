"""`GraphedStep`: a function of a loop without the callback, as a CUDA graph."""
