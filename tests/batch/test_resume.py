"""A job of `run --batch` that is interrupted, killed, damaged, or not alone."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from localllm.cli.journal import LIFETIME_S, SYNC_S, open_journal
from localllm.engine import sampler
from localllm.engine.engine import Engine
from localllm.errors import LocalLLMError, NonFiniteError
from tests.batch.support import PROMPTS, Start, Write, answers, batch, finish, rerun, wait_for_lines
from tests.cli_support import Result, run_cli
from tests.patience import PATIENCE_S
from tests.thinning import every_other

pytestmark = pytest.mark.usefixtures("own_folders", "own_jobs")


# One that fails


@contextmanager
def fails(answered: list[dict[str, Any]]) -> Iterator[None]:
    """The token after the second prompt, which is as long as it was when the job was answered, is never drawn."""
    sample, prompt_tokens = sampler.sample, answered[1]["usage"]["prompt_tokens"]

    def failing(logits: Any, sequence: Any, token_ids: Any) -> int:
        if sequence.num_prompt_tokens == prompt_tokens:
            raise NonFiniteError("the model computed a NaN", why="it was told to")
        return sample(logits, sequence, token_ids)

    with mock.patch.object(sampler, "sample", failing):
        yield


def test_one_prompt_that_fails_does_not_end_the_job_and_is_tried_again(model: Path, file: Write) -> None:
    path = file(*PROMPTS)
    whole = answers(batch(model, path))
    with fails(whole):
        failed = batch(model, path)
    got = answers(failed)
    assert failed.code == 1 and "1 of 6 prompts failed" in failed.err
    assert [line["index"] for line in got] == list(range(6))
    assert (got[1]["finish_reason"], got[1]["error"]["what"]) == ("error", "the model computed a NaN")
    assert got[:1] + got[2:] == whole[:1] + whole[2:]
    again = batch(model, path)
    assert "5 of 6 answers were there" in again.err and "1 of 6 prompts answered, 4 tokens" in again.err
    assert answers(again) == whole


def test_the_same_numbers_in_other_bytes_go_on_with_the_job(model: Path, file: Write) -> None:
    path = file(*PROMPTS)
    with fails(answers(batch(model, path, "--fresh"))):
        assert batch(model, path, "--weights", "bf16").code == 1
    again = batch(model, path, "--weights", "bf12")
    assert again.code == 0 and "5 of 6 answers were there" in again.err


def test_an_engine_that_breaks_ends_the_job_and_what_was_answered_is_kept(
    model: Path, file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step, steps = file(*PROMPTS), Engine.step, iter(range(1000))

    def breaking(engine: Engine, tell: Any) -> Any:
        if next(steps) > 12:
            raise LocalLLMError("the disk is gone")
        return step(engine, tell)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", breaking)
        broken = batch(model, path, "--parallel", "1")
    assert broken.code == 1
    assert "interrupted; 3 of 6 answers are kept. To go on: the same command\nerror: the disk is gone" in broken.err
    assert was_there(batch(model, path)) == len(answers(broken)) == 3


# The journal


def journal_in(jobs: Path) -> Path:
    """The journal of the only job that was begun."""
    (path,) = jobs.glob("*/answers")
    return path


@pytest.fixture
def unfinished(model: Path, file: Write, own_folders: None, own_jobs: Path) -> Path:
    """A file of six prompts, of which a job has answered five."""
    path = file(*PROMPTS)
    with fails(answers(batch(model, path))):
        assert batch(model, path).code == 1
    return path


def was_there(result: Result) -> int:
    """How many answers came from an earlier run."""
    found = re.search(r"(\d+) of \d+ answers were there", result.err)
    return int(found[1]) if found else 0


@pytest.mark.usefixtures("unfinished")
def test_a_journal_is_its_owners_alone(own_jobs: Path) -> None:
    path = journal_in(own_jobs)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, own_jobs)] == [0o600, 0o700, 0o700]


def test_a_finished_job_leaves_nothing(model: Path, unfinished: Path, own_jobs: Path) -> None:
    assert was_there(batch(model, unfinished)) == 5
    assert list(own_jobs.iterdir()) == []
    assert was_there(batch(model, unfinished)) == 0


@pytest.mark.parametrize("damage", every_other(["cut", "flip", "zeros", "other"]))
def test_what_is_damaged_in_a_journal_is_computed_anew(damage: str, model: Path, unfinished: Path, own_jobs: Path):
    path = journal_in(own_jobs)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    damaged = {
        "cut": last[:-9],
        "flip": last.replace(b"text", b"tent"),
        "zeros": bytes(len(last)),
        "other": b'{"index": 1, "text": "never said"}\n',
    }
    path.write_bytes(b"".join([*whole, damaged[damage]]))
    result = batch(model, unfinished)
    assert was_there(result) == 4 and answers(result) == answers(batch(model, unfinished))


def test_a_journal_without_its_beginning_counts_as_none(model: Path, unfinished: Path, own_jobs: Path) -> None:
    path = journal_in(own_jobs)
    path.write_bytes(path.read_bytes()[3:])
    assert was_there(batch(model, unfinished)) == 0


def test_fresh_computes_all_of_it(model: Path, unfinished: Path) -> None:
    result = batch(model, unfinished, "--fresh")
    assert (result.code, was_there(result)) == (0, 0) and "6 of 6 prompts answered" in result.err


@pytest.mark.parametrize(
    "change",
    [
        ["--temperature", "0.5"],
        ["--dtype", "fp32"],
        ["-s", "be brief"],
        ["--kv-evict", "sinks:64"],
        pytest.param(["--attend", "top:1"], marks=pytest.mark.slow),
        pytest.param(["--reuse", "chunks"], marks=pytest.mark.slow),
        pytest.param(["--ctx", "100"], marks=pytest.mark.slow),
        pytest.param(["--raw"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_changes_the_texts_makes_another_job(change: list[str], model: Path, unfinished: Path) -> None:
    assert was_there(batch(model, unfinished, *change)) == 0
    assert was_there(batch(model, unfinished)) == 5


def test_another_prompt_makes_another_job(model: Path, unfinished: Path, file: Write) -> None:
    assert was_there(batch(model, file(*PROMPTS[:-1], "another end"))) == 0


def test_what_changes_no_text_goes_on_with_the_job(model: Path, unfinished: Path) -> None:
    assert was_there(batch(model, "-", "--parallel", "2", "--stats", stdin=unfinished.read_bytes())) == 5


def test_a_drawn_seed_belongs_to_the_job(model: Path, file: Write) -> None:
    line = ("run", model, "--batch", file(*PROMPTS), "--max-tokens", "4")
    with fails(answers(run_cli(*line))):
        first = answers(run_cli(*line))
    second = answers(run_cli(*line))
    assert (first[1]["finish_reason"], second[1]["finish_reason"]) == ("error", "length")
    assert [line["seed"] for line in first] == [line["seed"] for line in second]
    assert [line["seed"] - second[0]["seed"] for line in second] == [0, 1, 2, 3, 4, 5]


def test_jobs_that_nobody_went_on_with_for_a_month_are_forgotten(
    model: Path, unfinished: Path, own_jobs: Path, file: Write
) -> None:
    long_ago = time.time() - LIFETIME_S - 60
    os.utime(journal_in(own_jobs), (long_ago, long_ago))
    assert batch(model, file("another job")).code == 0
    assert list(own_jobs.iterdir()) == []


def test_the_disk_has_an_answer_a_second_after_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with open_journal("a job", 3, seed=1) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        journal.append({"index": 2})
        began = time.monotonic()
        journal.sync()
        assert synced == []
        monkeypatch.setattr(time, "monotonic", lambda: began + SYNC_S)
        journal.sync()
        journal.sync()
        assert len(synced) == 1
        journal.append({"index": 0})
    assert len(synced) == 2


def test_a_journal_that_cannot_be_kept_is_an_error(model: Path, own_jobs: Path, file: Write) -> None:
    own_jobs.write_text("in the way")
    result = batch(model, file("the fox"))
    assert (result.code, result.out, len(result.error_lines)) == (1, b"", 4)
    assert "the journal of this job cannot be kept" in result.err


# Kills, signals and company


@pytest.mark.slow
@pytest.mark.parametrize("seed", [[], ["--seed", "3"]], ids=["drawn", "given"])
def test_a_job_that_is_killed_again_and_again_prints_what_an_undisturbed_one_does(
    seed: list[str], slow_model: Path, file: Write, start: Start
) -> None:
    path, flags = file(*PROMPTS * 3), ["--max-tokens", "60", *seed]
    moment, printed = random.Random(), b""
    for least in (1, 5, 9):
        process = start(slow_model, path, *flags)
        head = wait_for_lines(process, least)
        time.sleep(moment.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        whole_lines = (head + finish(process).out).rpartition(b"\n")[0]
        assert whole_lines.startswith(printed) or printed.startswith(whole_lines)  # with the clock's own words
        printed = max(printed, whole_lines, key=len)
    resumed = rerun(slow_model, path, *flags)
    assert resumed.code == 0, resumed.err
    assert resumed.out.startswith(printed) and was_there(resumed) >= printed.count(b"\n") + 1
    first_seed = answers(resumed)[0]["seed"]
    lines = [{"prompt": prompt, "seed": first_seed + (0 if seed else n)} for n, prompt in enumerate(PROMPTS * 3)]
    undisturbed = rerun(slow_model, file(*lines), "--max-tokens", "60")
    assert answers(resumed) == answers(undisturbed)


def test_a_job_that_is_killed_goes_on_with_what_it_had(slow_model: Path, file: Write, start: Start) -> None:
    path = file(*PROMPTS * 3)
    process = start(slow_model, path)
    printed = wait_for_lines(process, 3)
    process.kill()
    finish(process)
    resumed = rerun(slow_model, path)
    assert resumed.code == 0 and was_there(resumed) >= 3
    assert resumed.out.startswith(printed)  # with the clock's own words


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_job_and_says_how_it_goes_on(
    number: signal.Signals, code: int, slow_model: Path, file: Write, start: Start
) -> None:
    path = file(*PROMPTS * 2)
    process = start(slow_model, path)
    head = wait_for_lines(process, 2)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == code
    told = re.fullmatch(r"interrupted; (\d+) of 12 answers are kept. To go on: the same command\n", stopped.err)
    assert told and 2 <= int(told[1]) < 12
    resumed = rerun(slow_model, path)
    assert resumed.code == 0 and resumed.out.startswith(head + stopped.out)
    assert was_there(resumed) == int(told[1])


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_job_in_silence(slow_model: Path, file: Write, start: Start) -> None:
    path = file(*PROMPTS * 3)
    process = start(slow_model, path)
    wait_for_lines(process, 1)
    process.stdout.close()  # type: ignore[union-attr]
    process.stdout = None
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, b"")
    assert was_there(rerun(slow_model, path)) >= 1


def test_a_second_process_at_the_same_job_is_refused_with_the_firsts_number(
    slow_model: Path, file: Write, start: Start, own_jobs: Path
) -> None:
    path = file(*PROMPTS * 3)
    first = start(slow_model, path, "--max-tokens", "400")
    while not list(own_jobs.glob("*/answers")):
        assert first.poll() is None
        time.sleep(0.05)
    second = rerun(slow_model, path, "--max-tokens", "400")
    assert (second.code, second.out, len(second.error_lines)) == (1, b"", 4)
    assert f"process {first.pid} is at it" in second.err and first.poll() is None
