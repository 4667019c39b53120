"""What runs inside or beside other routers, and asks kvsight for them.

Start at `picking`, which chooses endpoints, then `endpoint_picker`, which answers Envoy.
"""
