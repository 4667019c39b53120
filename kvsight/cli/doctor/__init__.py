"""`kvsight doctor`: goes along the way of one page and names the first broken link.

`command.py` has the straight list of checks. `checks.py` runs them. `servers.py` checks Kafka, Redis and the
service, and `probe.py` follows one prompt through engine, log and index, with
`arrivals.py`, which listens to the topic, and `clocks.py`.
"""
