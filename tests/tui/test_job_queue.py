"""A thread of jobs: their order, and its end."""

from __future__ import annotations

import threading
import time

from localllm.tui.job_queue import JobQueue


def test_the_first_is_done_before_what_was_asked_for_while_it_was_not_known() -> None:
    done: list[str] = []
    jobs = JobQueue("test")
    jobs.do(lambda: done.append("early"))
    jobs.begin(lambda: done.append("first"))
    jobs.do(lambda: done.append("late"))
    jobs.close(5.0)
    assert done == ["first", "early", "late"]


def test_what_was_asked_for_is_done_when_the_thread_is_closed() -> None:
    done: list[str] = []
    jobs = JobQueue("test")
    jobs.begin()
    jobs.do(lambda: time.sleep(0.1))
    jobs.do(lambda: done.append("late"))
    jobs.close(5.0)
    assert done == ["late"]


def test_a_job_that_takes_too_long_holds_nobody_up_and_one_that_never_began_neither() -> None:
    ended = threading.Event()
    jobs = JobQueue("test")
    jobs.begin(ended.wait)
    jobs.close(0.05)
    ended.set()
    JobQueue("test").close(5.0)
