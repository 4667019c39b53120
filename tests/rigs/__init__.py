"""Real parts under test, each with what surrounds it."""
