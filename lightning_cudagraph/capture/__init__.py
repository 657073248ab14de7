"""Capture and replay of steps, without Lightning."""
