"""Capture and replay of training steps. Knows torch, and nothing of Lightning."""
