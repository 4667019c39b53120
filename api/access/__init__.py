"""Who may ask, from where, how often, and over how many connections."""
