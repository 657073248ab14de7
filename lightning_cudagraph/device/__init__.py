"""Streams, graphs and events of the device that steps are captured on: CUDA or the CPU emulator."""
