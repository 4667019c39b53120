"""What several commands share: output, tables, flags, prompts, and the state of the process."""
