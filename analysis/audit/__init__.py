"""The audit of a log: what went wrong in its streams, and where cached tokens were lost.

Start at `audit.audit_log`; then read `events` (what the records of events show), `book` (which pages each stream holds,
and since when) and `funnel` (what routers made of it).
"""
