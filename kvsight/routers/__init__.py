"""What runs for other routers. Start at `picking`, then `endpoint_picker`, which answers Envoy."""
