"""The effect of a signal to the launcher, by kind, time and earlier signals."""

from __future__ import annotations

import os
import signal

import pytest

from grpo_recipes.launch.monitor import StoppedAtOnce, StopSignals


@pytest.fixture(autouse=True)
def asked_signals():
    """The signals as a terminal leaves them: whoever runs the tests in the background ignores some of them."""
    plain = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), signal.SIG_DFL)
    plain |= {signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in plain.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def stop(tmp_path):
    with StopSignals() as stop:
        stop.resume(tmp_path / "stop")
        yield stop


def send(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_trainers_with_something_to_save_are_asked_by_the_file(stop, capsys, signum):
    stop.set_save_condition(lambda: True)
    send(signum)
    stop.check()
    assert stop.requested and stop.request.exists()
    assert capsys.readouterr().out == f"grpo: {signal.Signals(signum).name}: saving, then ending\n"
    assert stop.wants_requeue == (signum == signal.SIGUSR1)


@pytest.mark.parametrize(
    ("signum", "code", "cause"),
    [
        (signal.SIGUSR1, 75, "stopped on request before this attempt had anything to save"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGINT, 130, "stopped by SIGINT"),
    ],
)
def test_with_nothing_to_save_a_signal_ends_the_attempt_at_once(stop, signum, code, cause):
    with pytest.raises(StoppedAtOnce) as stopped:
        send(signum)
    assert (stopped.value.ending().code, stopped.value.ending().cause) == (code, cause)
    assert stop.wants_requeue == (signum == signal.SIGUSR1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_the_second_time_a_signal_ends_the_attempt_but_within_a_second_two_are_one(stop, signum, monkeypatch):
    stop.set_save_condition(lambda: True)
    send(signum)
    send(signum)  # timeout signals its child, then its group
    stop.check()
    assert stop.requested
    monkeypatch.setattr(StopSignals, "_same_signal_seconds", 0.0)
    with pytest.raises(StoppedAtOnce):
        send(signum)


def test_a_signal_that_follows_at_once_does_not_disturb_the_clean_up(stop):
    with pytest.raises(StoppedAtOnce) as stopped:
        send(signal.SIGTERM)
    send(signal.SIGHUP, signal.SIGTERM)
    assert stopped.value.ending().code == 143 and not stop.wants_requeue


def test_usr1_again_ends_nothing_since_slurm_may_send_it_where_we_have_asked_already(stop):
    stop.set_save_condition(lambda: True)
    stop.request_requeue("the job's time limit comes in 60 s")
    send(signal.SIGUSR1, signal.SIGUSR1)
    stop.check()
    assert stop.requested and stop.wants_requeue


@pytest.mark.parametrize("later", [signal.SIGTERM, signal.SIGINT])
def test_who_wants_the_run_ended_is_not_answered_with_a_requeue(stop, later):
    stop.set_save_condition(lambda: True)
    send(signal.SIGUSR1, later)
    assert stop.requested and not stop.wants_requeue


def test_sigterm_leaves_the_trainers_a_moment_to_save(stop, monkeypatch):
    monkeypatch.setattr(StopSignals, "_term_grace_seconds", 0.0)
    stop.set_save_condition(lambda: True)
    send(signal.SIGUSR1)
    stop.check()
    send(signal.SIGTERM)
    with pytest.raises(StoppedAtOnce) as stopped:
        stop.check()
    assert stopped.value.ending().code == 143


def test_a_request_by_the_file_alone_ends_an_attempt_with_nothing_to_save(stop):
    stop.request.touch()
    with pytest.raises(StoppedAtOnce) as stopped:
        stop.check()
    assert stopped.value.ending().code == 75 and not stop.wants_requeue
    stop.set_save_condition(lambda: True)
    stop.check()


def test_a_signal_while_the_run_directory_is_made_waits_until_it_is_whole(tmp_path):
    with StopSignals() as stop:
        stop.defer()
        send(signal.SIGUSR1)
        with pytest.raises(StoppedAtOnce):
            stop.resume(tmp_path / "stop")
        assert stop.wants_requeue


def test_a_signal_that_was_ignored_on_purpose_stays_ignored_but_for_usr1():
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        with StopSignals():
            send(signal.SIGHUP)
            with pytest.raises(StoppedAtOnce):
                send(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
