"""Copies on CUDA streams, and the choice of a copy engine for a device."""

from collections.abc import Callable

import torch

from engine_cache.tiers.copying import Lane, Step, ThreadCopyEngine


class CudaCopyEngine(ThreadCopyEngine):
    """One thread and one stream for each lane.

    A step starts after the work that the submitting thread has put on the current stream, so that the data to copy is
    complete. It is done when its stream has finished.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._streams = {lane: torch.cuda.Stream(self._device) for lane in (Lane.WRITE, Lane.LOAD)}  # type: ignore[no-untyped-call]

    def _step_runner(self, lane: Lane) -> Callable[[Step], None]:
        stream = self._streams.get(lane)
        if stream is None:
            return super()._step_runner(lane)
        computed = torch.cuda.current_stream(self._device).record_event()

        def run_on_stream(step: Step) -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                step()
                stream.synchronize()

        return run_on_stream


def copy_engine_for(device: str) -> ThreadCopyEngine:
    """Return the copy engine for pools on `device`: streams for CUDA, threads otherwise."""
    return CudaCopyEngine(device) if torch.device(device).type == "cuda" else ThreadCopyEngine()
