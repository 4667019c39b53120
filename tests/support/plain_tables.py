"""Page tables whose tags a test can choose."""

import numpy as np

PLAIN = np.array([0, 1], "<u8").tobytes()
"""A secret with which the tag of a key is its upper half."""
