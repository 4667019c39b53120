"""Why each worker holds no more of a prompt. Start at `explanation.explain`."""
