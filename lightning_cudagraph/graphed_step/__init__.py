"""`GraphedStep`: a step of somebody's own loop, or a part of one, as a CUDA graph."""
