"""What tests share: servers they start, rigs, state machines, oracles."""
