"""An engine's own ZMQ publisher in a separate process, with the events of a cache under a random workload.

Usage: `python -m tests.support.engines.publisher_process JSON`. The JSON object has the keys engine, folder, endpoint,
replay_endpoint, rank, hwm, seed, batches and ledger. `ledger` names a file that is written when everything has been
published; it lists the remaining pages: [[tier, sequence hash], ...]. The first batch is published at once, the others
as soon as a file of that name with the suffix `.go` exists.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.event_payloads import names_of
from tests.support.engines.released_modules import engine_module
from tests.support.waiting import wait_until

BLOCK = 16
WHOLE_DIGESTS = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
"""A variable of vLLM: with 0, it sends hashes unchanged."""
MEDIA = {"sglang": ("GPU", "CPU_PINNED", "DISK", "EXTERNAL"), "vllm": ("GPU", "CPU", "STORAGE")}


class Life:
    """A random cache: its operations as events of the engine's own classes, and the pages it holds."""

    def __init__(self, module: Any, engine: str, seed: int) -> None:
        self.pages: set[tuple[int, int]] = set()
        self._module = module
        self._engine = engine
        self._random = random.Random(seed)
        self._whole_digests = engine == "vllm" and os.environ.get(WHOLE_DIGESTS) == "0"
        self._prompts: list[tuple[list[int], list[Any]]] = []  # tokens, the engine's hashes

    def events(self) -> list[Any]:
        """Return the events of one step."""
        kind = self._random.random()
        if kind < 0.01:
            self.pages.clear()
            return [self._module.AllBlocksCleared()]
        if kind < 0.75 or not self._prompts:
            return [self._store(self._new_prompt()) for _ in range(self._random.randint(1, 4))]
        return [self._remove(self._random.choice(self._prompts)) for _ in range(self._random.randint(1, 4))]

    def _new_prompt(self) -> tuple[list[int], list[Any], int]:
        """Return a complete prompt and the number of its pages that an earlier prompt shares."""
        tokens, hashes = self._random.choice(self._prompts) if self._prompts else ([], [])
        shared = self._random.randint(0, len(hashes)) if self._random.random() < 0.5 else 0
        more = self._random.randint(1, 20)
        tokens = tokens[: shared * BLOCK] + [self._random.randrange(2**17) for _ in range(more * BLOCK)]
        hashes = hashes[:shared] + [self._hash() for _ in range(more)]
        self._prompts.append((tokens, hashes))
        return tokens, hashes, shared

    def _store(self, prompt: tuple[list[int], list[Any], int]) -> Any:
        tokens, hashes, shared = prompt
        tier = self._tier()
        first = 0 if tier else shared
        self.pages |= {(tier, name) for name in names_of(tokens, BLOCK)[first:]}
        fields = {"lora_name": None} if self._engine == "vllm" else {}
        return self._module.BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=tokens[first * BLOCK :],
            block_size=BLOCK,
            lora_id=None,
            medium=MEDIA[self._engine][tier],
            **fields,
        )

    def _remove(self, prompt: tuple[list[int], list[Any]]) -> Any:
        tokens, hashes = prompt
        tier = self._tier()
        places = self._random.sample(range(len(hashes)), self._random.randint(1, len(hashes)))
        names = names_of(tokens, BLOCK)
        self.pages -= {(tier, names[place]) for place in places}
        return self._module.BlockRemoved(
            block_hashes=[hashes[place] for place in places], medium=MEDIA[self._engine][tier]
        )

    def _tier(self) -> int:
        return self._random.randrange(len(MEDIA[self._engine])) if self._random.random() < 0.3 else 0

    def _hash(self) -> Any:
        """Return a random block hash. SGLang's are signed; vLLM's are unsigned or complete digests."""
        if self._whole_digests:
            return self._random.randbytes(32)
        if self._engine == "sglang":
            return self._random.randrange(-(2**63), 2**63)
        return self._random.randrange(2**64)


def main(options: dict[str, Any]) -> None:
    module = engine_module(options["engine"], Path(options["folder"]))
    publisher = module.ZmqEventPublisher(
        options["rank"], options["endpoint"], options["replay_endpoint"], buffer_steps=1_000_000, hwm=options["hwm"]
    )
    life = Life(module, options["engine"], options["seed"])
    ledger = Path(options["ledger"])
    # all but the first at once, so that some wait for the socket, whose queue is short, and are dropped
    first, *others = [
        module.KVEventBatch(ts=float(number), events=life.events()) for number in range(options["batches"])
    ]
    publisher.publish(first)
    wait_until(ledger.with_suffix(".go").exists, 60, "the order to go on")
    for batch in others:
        publisher.publish(batch)
    ledger.with_suffix(".part").write_text(json.dumps(sorted(life.pages)))
    ledger.with_suffix(".part").replace(ledger)
    signal.pause()  # the process is killed, as engines are


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
