"""Measurements on a GPU; nothing here is a test."""
