"""The audit of a log: what went wrong in its streams, and where cached tokens were lost.

Start at `audit.audit_log`; then read `stream_audit` (what the records of events show), `residency` (which pages each
stream holds, and since when) and `decision_audit` (what routers made of it).
"""
