"""Asks every service all the time, as routers do, and writes down each answer.

Usage: `python -m tests.chaos.asker JSON`. The JSON object has the fields of `AskerOptions`. One thread for each service
sends `POST /query` at a steady rate over a kept connection, for the prompts that the engines hold all the time. Each
answer is a row of ANSWER_ROW in the file.
"""

import http.client
import os
import sys
import threading
import time

import msgspec
import numpy as np

ANSWER_ROW = np.dtype(
    [("at", "<f8"), ("seconds", "<f8"), ("status", "<u2"), ("service", "u1"), ("engine", "u1"), ("held", "<i4")]
)
"""at: time of the monotonic clock at which the question was sent. status: 0 for a connection that failed. held: tokens
of the prompt that a live view claims; NOT_LIVE if the view is not live, or in what the answer says is missing;
LEFT_OUT if the answer has no view of the engine and does not say that something is missing."""
NOT_LIVE, LEFT_OUT = -1, -2
_TIMEOUT_S = 60.0
_RETRY_S = 0.02


class Asked(msgspec.Struct):
    worker: str
    model: str
    tenant: str
    tokens: list[int]


class AskerOptions(msgspec.Struct):
    ports: list[int]
    prompts: list[Asked]
    file: str
    per_s: float = 50.0
    """Questions a second to each service."""


class _Instance(msgspec.Struct):
    state: str
    longest_matched: int


class _Answer(msgspec.Struct):
    instances: dict[str, _Instance] = {}
    missing: list[msgspec.Raw] = []


class _Asker:
    def __init__(self, options: AskerOptions, service: int, output: int) -> None:
        self._options, self._service, self._output = options, service, output
        self._decoder = msgspec.json.Decoder(_Answer)
        self._connection = self._new_connection()
        self._bodies = [
            msgspec.json.encode({"model_name": each.model, "routing_group": each.tenant, "token_ids": each.tokens})
            for each in options.prompts
        ]

    def run(self) -> None:
        due, number = time.monotonic(), 0
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + 1 / self._options.per_s, time.monotonic() - 1.0)
            number = (number + 1) % len(self._bodies)
            at = time.monotonic()
            status, held = self._ask(number)
            row = np.array([(at, time.monotonic() - at, status, self._service, number, held)], ANSWER_ROW)
            os.write(self._output, row.tobytes())
            if status == 0:
                self._connection.close()
                self._connection = self._new_connection()
                time.sleep(_RETRY_S)

    def _ask(self, number: int) -> tuple[int, int]:
        try:
            self._connection.request("POST", "/query", self._bodies[number], {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return 0, NOT_LIVE
        if response.status != http.client.OK:
            return response.status, NOT_LIVE
        return response.status, _held(self._decoder.decode(body), self._options.prompts[number].worker)

    def _new_connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._options.ports[self._service], timeout=_TIMEOUT_S)


def _held(answer: _Answer, worker: str) -> int:
    instance = answer.instances.get(worker)
    if instance is None:
        return NOT_LIVE if answer.missing else LEFT_OUT
    return instance.longest_matched if instance.state == "live" else NOT_LIVE


def _main(options: AskerOptions) -> None:
    output = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    threads = [threading.Thread(target=_Asker(options, service, output).run) for service in range(len(options.ports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=AskerOptions))
