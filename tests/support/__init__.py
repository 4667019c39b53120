"""Helpers shared by tests.

`servers`: real servers that tests start. `engines`: the engines' side of the wire. `caches`: rigs, state machines and
oracles for prefix caches. `bridge`: bridges whose results can be inspected. `log`: records and consumers of the event
log.
"""
