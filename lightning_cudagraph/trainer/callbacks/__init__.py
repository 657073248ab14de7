"""The callbacks that users add to a trainer, and the captured runs that `CUDAGraphCallback` makes."""
