"""Where records come from: `kafka`, `memory`, `file`. Start at `base.Source`, the contract of all three.

Each module imports its own client only; nothing here knows views or indexes.
"""
