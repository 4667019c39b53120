"""Prompts as text: from messages to the tokens that an engine makes of them. Start at `renderer.py`."""
