"""CUDA as the device of captures."""
