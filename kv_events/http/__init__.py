"""The bodies of the API's answers, one msgspec struct each: the server encodes them, the clients decode them.

`queries`, `workers`, `events`, `registrations`, `service`, ...: one module for each group of routes. Imports
nothing but msgspec and the standard library, so that both sides can load it. Decoding ignores unknown fields, and
fields that were added later have a default, so that clients and servers of different versions understand each other.
"""
