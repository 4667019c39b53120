"""The `kvsight` command: one module per subcommand. Start at `main`.

Commands import heavy modules inside their functions, so that `--help` is fast.
"""
