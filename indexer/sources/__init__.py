"""Sources of records: `kafka`, `memory` and `file`. Start at `base.Source`, their interface.

Each module imports only its own client. No source depends on views or indexes.
"""
