"""Applications for the tests of the API."""

from tests.rigs.api import Serving, client, fed, serving

__all__ = ["Serving", "client", "fed", "serving"]
