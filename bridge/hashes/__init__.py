"""Engine hashes -> sequence hashes.

`event_translator.EventTranslator` translates the runs of one worker stream. `hash_translator` remembers the sequence
hash of each engine hash, `namespaces` keeps equal hashes of different attention groups apart, and `tier_mapper` maps
media to tiers and publishes. Imports `decoding`, not `stream`.
"""
