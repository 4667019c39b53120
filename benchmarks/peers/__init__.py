"""kvsight side by side with NVIDIA Dynamo's Rust indexer, both as services: `python -m benchmarks.peers`."""
