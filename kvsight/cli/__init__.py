"""The `kvsight` command, one file a subcommand. Start at `main`.

Commands import what is heavy inside their functions, so that `--help` answers at once.
"""
