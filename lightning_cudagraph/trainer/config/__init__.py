"""The user's settings, and what is refused before the first step."""
