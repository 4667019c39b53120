"""What tests share.

`servers`: real servers to start. `engines`: the engines' side of the wire. `caches`: rigs, state machines and oracles
of prefix caches. `bridge`: bridges to look into. `log`: records and consumers of the event log.
"""
