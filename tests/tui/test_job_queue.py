"""A queue of jobs: their order, and its end."""

from __future__ import annotations

import threading
import time

from localllm.tui.job_queue import DaemonExecutor, JobQueue
from tests.patience import wait_for


def started(jobs: JobQueue, first: object = None) -> threading.Thread:
    thread = threading.Thread(target=jobs.run, args=(first,), daemon=True)
    thread.start()
    wait_for(lambda: jobs._is_begun)
    return thread


def test_the_first_is_done_before_what_was_asked_for_while_it_was_not_known_and_all_before_the_end() -> None:
    done: list[str] = []
    jobs = JobQueue()
    jobs.add(lambda: done.append("early"))
    started(jobs, lambda: done.append("first"))
    jobs.add(lambda: time.sleep(0.1))
    jobs.add(lambda: done.append("late"))
    jobs.close(5.0)
    assert done == ["first", "early", "late"]


def test_a_job_that_takes_too_long_holds_nobody_up_and_one_that_never_began_neither() -> None:
    ended = threading.Event()
    jobs = JobQueue()
    started(jobs, ended.wait)
    jobs.close(0.05)
    ended.set()
    JobQueue().close(5.0)


def test_a_thread_of_a_worker_is_not_waited_for_at_the_end() -> None:
    ended = threading.Event()
    with DaemonExecutor() as executor:  # which waits for the threads of the library's own
        future = executor.submit(ended.wait)
    assert not future.done()
    ended.set()
    assert future.result(5.0)
