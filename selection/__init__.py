"""From scores to a decision: which worker gets a request, and what is booked for it.

`candidates` is what a policy sees, `policies` are the rules. Start at `policies`.
"""
