"""Engine hashes -> sequence hashes.

`event_translator.EventTranslator` translates the runs of one worker stream. `hash_memory` remembers the sequence hash
of each engine hash, `attention_groups` keeps equal hashes of different groups apart, and `page_publisher` publishes
pages. Imports `decoding`, not `stream`.
"""
