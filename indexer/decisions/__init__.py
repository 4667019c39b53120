"""Writing of routers' decisions: a bounded queue (`log`), and where they go (`kafka`, `file`). Start at `log`."""
