"""Sources of records: `kafka`, `memory` and `file`. Start at `base.Source`, their contract.

Each module imports its own client only; nothing here knows views or indexes.
"""
