"""A Mooncake master and native clients in this process with scripted answers.

A real store cannot return a chosen code at a chosen moment and does not report which memory is registered.
"""

import ctypes
import re
import socket
from collections import deque
from typing import Any

from engine_cache.settings import MooncakeSettings

NOT_FOUND, BAD_ARGUMENTS, NO_ROOM, OVERFLOW, TRANSFER_FAILED = -704, -600, -200, -10, -800


class DoubleMaster:
    """Accepts connections and holds the objects of all clients. `is_full`: whether it refuses new objects."""

    def __init__(self):
        self.objects, self.is_full = {}, False
        self.natives = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(100)

    @property
    def address(self):
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def settings(self, **values):
        """Return the settings of a client whose watch makes no periodic checks unless `values` enable them."""
        ours = {"mooncake_master": self.address, "mooncake_segment_bytes": 0, "mooncake_watch_interval_s": 1000.0}
        return MooncakeSettings.ignoring_environment(**ours | values)

    def make_native(self):
        """Create a client. Replaces the native client's class."""
        self.natives.append(NativeDouble(self))
        return self.natives[-1]

    def close(self):
        self._listener.close()


class NativeDouble:
    """`exist_answers`, `get_answers`: functions that the next calls for pages apply to the correct codes."""

    def __init__(self, master):
        self.master = master
        self.exist_answers: deque[Any] = deque()
        self.get_answers: deque[Any] = deque()
        self.registrations = []  # (address, bytes) of every call
        self.registered = {}
        self.left_registered = None  # buffers still registered when the client was closed
        self.segment_bytes = None
        self.calls = []  # (what, number of objects) of every call for pages

    def setup(self, hostname, metadata, segment_bytes, *others):
        self.segment_bytes = segment_bytes
        return 0

    def put(self, name, value):
        if self.master.is_full:
            return NO_ROOM
        self.master.objects.setdefault(name, value)
        return 0

    def get(self, name):
        return self.master.objects.get(name, b"")

    def get_size(self, name):
        return len(self.master.objects[name]) if name in self.master.objects else NOT_FOUND

    def batch_is_exist(self, names):
        codes = [int(name in self.master.objects) for name in names]
        if names[0].startswith("kvsight_"):
            return codes
        self.calls.append(("exist", len(names)))
        return self.exist_answers.popleft()(codes) if self.exist_answers else codes

    def batch_put_from(self, names, addresses, sizes):
        self.calls.append(("put", len(names)))
        return [self.put(name, ctypes.string_at(*where)) for name, *where in zip(names, addresses, sizes, strict=True)]

    def batch_get_into(self, names, addresses, sizes):
        self.calls.append(("get", len(names)))
        codes = [self._read(*each) for each in zip(names, addresses, sizes, strict=True)]
        return self.get_answers.popleft()(codes) if self.get_answers else codes

    def _read(self, name, address, size):
        content = self.master.objects.get(name)
        if content is None:
            return NOT_FOUND
        if len(content) > size:
            return BAD_ARGUMENTS
        ctypes.memmove(address, content, len(content))
        return len(content)

    def remove(self, name, force):
        return 0 if self.master.objects.pop(name, None) is not None else NOT_FOUND

    def batch_remove(self, names, force):
        return [self.remove(name, force) for name in names]

    def remove_all(self, force):
        self.master.objects.clear()
        return 0

    def remove_by_regex(self, pattern, force):
        gone = [name for name in self.master.objects if re.fullmatch(pattern, name)]
        self.batch_remove(gone, force)
        return len(gone)

    def register_buffer(self, address, num_bytes):
        self.registrations.append((address, num_bytes))
        self.registered[address] = num_bytes
        return 0

    def unregister_buffer(self, address):
        return 0 if self.registered.pop(address, None) is not None else BAD_ARGUMENTS

    def close(self):
        self.left_registered = dict(self.registered)
