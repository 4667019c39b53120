"""Several processes of one service on one machine, each with an index of its own. Start at `supervisor.py`.

They share a port, and little else: some shared memory (`replica.py`) and a private folder of Unix sockets through which
they ask each other (`asking.py`) for what one alone does not know.
"""
