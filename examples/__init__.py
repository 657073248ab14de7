"""Training scripts: ordinary Lightning code, with nothing in it about CUDA graphs."""
