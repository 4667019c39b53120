"""Engine hashes -> sequence hashes.

`translator.Translator` takes the runs of one worker stream and hands pages to its publisher. `hash_translator`
remembers which sequence hash belongs to which engine hash, `namespaces` keeps equal hashes of different attention
groups apart, and `tier_mapper` maps the engine's media to our four tiers. Imports `decoding`, not `stream`.
"""
