"""Shows the clients' methods in the reference, which reads the source without running it."""

from typing import Any

import griffe


class ClientMethods(griffe.Extension):
    """Replaces each `name = _blocking(calls.name)` and `name = _awaitable(calls.name)` by the method that it makes."""

    def on_package(self, *, pkg: griffe.Module, **_loader: Any) -> None:
        """Called for each package when all its modules are read."""
        if pkg.path == "kvsight":
            for client in ("Client", "AsyncClient"):
                _add_methods(pkg["client"][client], pkg["calls"].functions)


def _add_methods(client: griffe.Class, calls: dict[str, griffe.Function]) -> None:
    for name in client.attributes.keys() & calls.keys():
        made, call = client[name], calls[name]
        assert isinstance(call.returns, griffe.ExprSubscript)  # Call[T]
        method = griffe.Function(
            name,
            lineno=made.lineno,
            parameters=griffe.Parameters(griffe.Parameter("self"), *call.parameters),
            returns=call.returns.slice,
            docstring=call.docstring,
        )
        method.labels.update({"async"} if client.name == "AsyncClient" else ())
        client.set_member(name, method)
