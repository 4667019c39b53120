"""Operations of a machine that run requests on its rig, from their match to their end."""

from __future__ import annotations

from engine_cache import EvictParams
from kv_events.schema import StorageMedium
from tests.support.caches.cache_machine import operation


class RequestSteps:
    """Operations of a machine that has `rig`."""

    def one_request(self, draw):
        return draw.choice(list(self.rig.served.running))

    @operation(weight=4)
    def begin_a_request(self, draw):
        req = self.rig.served.begin(*self.prompt_to_run(draw))
        if req is not None and draw.random() < 0.6:
            self.load_the_match_of(req, draw)

    def prompt_to_run(self, draw):
        """Draw a prompt. Most of them have been evicted from the device."""
        away = sorted(self.rig.held(StorageMedium.CPU) - self.rig.held(StorageMedium.GPU), key=str)
        if away and draw.random() < 0.7:
            extra_key, raw = draw.choice(away)
            tokens = [*raw, *[1] * draw.randrange(4)]
            self.seen.update(self.names.prefixes(tokens, extra_key))
            return tokens, extra_key
        return self.prompt(draw)

    @operation()
    def most_leaves_the_device(self, draw):
        self.checked_evict(EvictParams(*draw.choice(((1000, 1000, 1000), (4, 0, 0), (0, 4, 0)))))

    @operation(weight=2, when=lambda machine: machine.rig.served.matched)
    def load_an_old_match(self, draw):
        self.load_the_match_of(draw.choice(list(self.rig.served.matched)), draw)

    def load_the_match_of(self, req, draw):
        self.rig.served.load_back(req, draw.choice((None, None, None, 0, 2)))

    @operation(weight=4, when=lambda machine: machine.rig.served.running)
    def compute_some(self, draw):
        req = self.one_request(draw)
        tokens = self.rig.served.running[req]
        more = draw.randrange(len(tokens) + 1)
        self.rig.served.compute(req, tokens[:more])
        if self.rig.swa and req in self.rig.served.running and draw.random() < 0.5:
            self.rig.served.slide_window(req)

    @operation(weight=2, when=lambda machine: machine.rig.served.running)
    def share_what_is_computed(self, draw):
        self.rig.served.share(self.one_request(draw), chunked=draw.random() < 0.3)

    @operation(weight=3, when=lambda machine: machine.rig.served.running)
    def end_a_request(self, draw):
        self.rig.served.end(self.one_request(draw), is_insert=draw.random() < 0.7)

    @operation(weight=2, when=lambda machine: machine.rig.served.waiting)
    def abort_before_it_runs(self, draw):
        self.rig.served.end(draw.choice(list(self.rig.served.waiting)), is_insert=False)
