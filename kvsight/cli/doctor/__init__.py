"""`kvsight doctor`: goes along the way of one page and names the first broken link.

Start at `command`, which has the straight list of checks.
"""
