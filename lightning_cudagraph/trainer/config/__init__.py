"""The user's settings, and checks before the first step."""
