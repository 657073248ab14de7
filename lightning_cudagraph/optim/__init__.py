"""Optimizer steps and gradient scaling without host synchronisation. Imports torch, and no Lightning."""
