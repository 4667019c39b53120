"""Why do workers hold no more of a prompt? `python -m benchmarks.bench_explain [--json FILE]`

Logs of 10M changes of pages by 64 workers. Each worker stores prompts of 1,024 pages in records of 16 to 128 pages and
removes its oldest ones. The prompt that is asked for, of 1,000 pages given as tokens, is one of 500. The records are in
the page cache of the operating system.
"""

import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.explanation import explain
from benchmarks.bench_replay import NUM_CHANGES, NUM_WORKERS, PAGE_TOKENS, Worker
from benchmarks.report import Figure, figure, main, timed
from indexer.index import OverlapIndex
from indexer.replay import Timeline
from kv_events.hashing import U32Array, sequence_hashes
from kv_events.http.parsed_query import ParsedQuery
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord

NUM_PROMPTS, PROMPT_PAGES, ASKED_PAGES = 500, 1024, 1000
PAGES_PER_RECORD = (16, 64, 128)
NUM_RUNS = 3
_RANDOM_SEED = 1
_START_S, _STEP_S = 1.7e9, 0.01


def write_log(folder: Path, record_pages: int) -> U32Array:
    """Write the log. Returns the tokens of the prompt to ask for."""
    generator = np.random.default_rng(_RANDOM_SEED)
    tokens = generator.integers(0, 150_000, PROMPT_PAGES * PAGE_TOKENS, dtype=np.uint32)
    prompts = [sequence_hashes(tokens, PAGE_TOKENS)]
    prompts += [generator.integers(1, 2**64, PROMPT_PAGES, dtype=np.uint64) for _ in range(NUM_PROMPTS - 1)]
    index = OverlapIndex()
    workers = [Worker(number, index) for number in range(NUM_WORKERS)]
    done, now = 0, _START_S
    with EventLogWriter(folder) as writer:
        for worker in cycle(workers):
            prompt = prompts[int(generator.integers(NUM_PROMPTS))]
            for start in range(0, PROMPT_PAGES, record_pages):
                payload, changes = worker.store(prompt[start : start + record_pages], now)
                writer.append(LogRecord(0, writer.next_index, int(now * 1000), worker.stream.key.encode(), payload))
                done, now = done + changes, now + _STEP_S
            if done >= NUM_CHANGES:
                return tokens[: ASKED_PAGES * PAGE_TOKENS]
    raise AssertionError("the workers are cycled forever")


def explained(folder: Path, record_pages: int) -> list[Figure]:
    """Measure explanations from one log."""
    prompt = AskedPrompt(ParsedQuery("model", "default", "token_ids"), write_log(folder, record_pages))
    seconds, cpu_seconds = [], []
    for _ in range(NUM_RUNS):
        log, began = Timeline(folder), time.process_time()
        seconds.append(timed(explain, prompt, log.chunks(log.first_index)))
        cpu_seconds.append(time.process_time() - began)
    causes = [worker.cause for worker in explain(prompt, log.chunks(log.first_index)).workers]
    if len(causes) != NUM_WORKERS or "evicted" not in causes:
        raise AssertionError(f"not the log that was meant: {causes}")
    return [
        figure(f"explain 1,000 pages, {record_pages} pages a record", "s", seconds, "<= 5"),
        figure("the same, CPU time", "s", cpu_seconds),
    ]


def run() -> list[Figure]:
    """Return all figures of this module."""
    with TemporaryDirectory() as name:
        return [each for pages in PAGES_PER_RECORD for each in explained(Path(name, str(pages)), pages)]


if __name__ == "__main__":
    main("explain", run)
