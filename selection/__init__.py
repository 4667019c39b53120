"""From scores to a decision: which worker gets a request, and what is booked for it.

`candidates` is what a policy sees, `policies` are the rules. `selector` chooses among the ranks of a `roster`, `book`
keeps what was reserved, and `exchange` shares it among replicas. Start at `selector`.
"""
