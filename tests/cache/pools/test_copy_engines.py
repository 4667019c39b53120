"""Copy engines: lanes, tickets, failures."""

import threading
from functools import partial

import pytest

from engine_cache import Lane, ManualCopyEngine, ThreadCopyEngine, TransferError


@pytest.fixture
def engine():
    engine = ThreadCopyEngine()
    yield engine
    engine.close()


def test_jobs_of_a_lane_run_in_order_and_lanes_do_not_wait_for_each_other(engine):
    gate, order = threading.Event(), []
    blocked = engine.submit(Lane.WRITE, [gate.wait, lambda: order.append("first")])
    behind = engine.submit(Lane.WRITE, [lambda: order.append("second")])
    other = engine.submit(Lane.LOAD, [lambda: order.append("other lane")])
    other.synchronize()
    assert not blocked.query()
    assert not behind.query()
    gate.set()
    behind.synchronize()
    assert order == ["other lane", "first", "second"]


def test_a_ticket_reports_how_far_a_job_is(engine):
    gate = threading.Event()
    ticket = engine.submit(Lane.LOAD, [lambda: None, gate.wait])
    ticket.wait_for_step(0)
    assert not ticket.query()
    gate.set()
    ticket.wait_for_step(1)
    assert ticket.query()
    assert ticket.error is None


def test_a_step_that_fails_is_tried_once_more(engine):
    attempts = list[int]()

    def fails_once():
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise RuntimeError("injected")

    ticket = engine.submit(Lane.WRITE, [fails_once])
    ticket.synchronize()
    assert (attempts, ticket.error) == ([0, 1], None)


def test_a_step_that_fails_twice_ends_its_job_and_not_its_lane(engine):
    ran = []

    def fails():
        ran.append("failed")
        raise RuntimeError("injected")

    ticket = engine.submit(Lane.LOAD, [lambda: None, fails, lambda: ran.append("never")])
    ticket.synchronize()
    assert str(ticket.error) == "injected"
    ticket.wait_for_step(0)
    with pytest.raises(TransferError, match="step 1 of 3 failed: injected"):
        ticket.wait_for_step(1)
    engine.submit(Lane.LOAD, [lambda: ran.append("next")]).synchronize()
    assert ran == ["failed", "failed", "next"]


def test_drain_waits_for_what_jobs_have_submitted_too(engine):
    ran = []
    engine.submit(Lane.WRITE, [lambda: engine.submit(Lane.LOAD, [lambda: ran.append("inner")]) and None])
    assert engine.drain()
    assert ran == ["inner"]


def test_drain_stops_after_its_time(engine):
    gate = threading.Event()
    engine.submit(Lane.WRITE, [gate.wait])
    assert not engine.drain(0.01)
    gate.set()
    assert engine.drain()


def test_a_manual_engine_runs_steps_in_any_order():
    engine, ran = ManualCopyEngine(), list[int]()
    tickets = [engine.submit(Lane.WRITE, [partial(ran.append, n)]) for n in range(3)]
    assert engine.num_queued(Lane.WRITE) == 3
    assert engine.step(Lane.WRITE, 1)
    assert [ticket.query() for ticket in tickets] == [False, True, False]
    assert not engine.step(Lane.LOAD)
    tickets[2].synchronize()
    assert ran == [1, 0, 2]


def test_a_job_that_a_closed_engine_refuses_is_not_waited_for():
    engine = ThreadCopyEngine()
    engine.close()
    with pytest.raises(RuntimeError):
        engine.submit(Lane.ARCHIVE, [lambda: None])
    assert engine.drain(1.0)
