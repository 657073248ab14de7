"""A user's module of settings, which steps import and other code changes."""

IMPORTED = 1.0
BY_NAME = 1.0
