"""Applications for the tests of the API."""

from tests.rigs.api import client, fed, serving

__all__ = ["client", "fed", "serving"]
