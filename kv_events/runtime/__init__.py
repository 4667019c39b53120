"""What every process of kvsight needs: settings, TLS, traces, and tasks that survive errors."""
