"""Real engines as judges: `python -m tests.engines` compares the index with what each engine says it reused."""
