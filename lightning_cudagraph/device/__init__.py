"""A device that a step is captured on: streams, graphs and events, on CUDA and on the emulator."""
