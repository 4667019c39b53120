"""State machines of prefix caches: random operations with all invariants checked after each one."""
