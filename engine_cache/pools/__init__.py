"""Pools of device and host memory, and the owners of their rows.

`allocators.py` allocates rows and `req_to_token.py` maps the tokens of requests to rows; both need only numpy. The
other modules hold tensors and import torch, so this module does not import them.
"""
