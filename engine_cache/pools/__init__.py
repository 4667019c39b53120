"""Pools of device and host memory, and the owners of their rows.

`allocators.py` and `entry.py` need only numpy. The other modules hold tensors and import torch, so this module does not
import them.
"""
