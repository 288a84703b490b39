import os
import signal
import subprocess
import sys

import pytest

from jgesr_lightning.runtime import signals
from jgesr_lightning.runtime.signals import StopRequest

ASKING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_sets_the_flag_and_the_former_handler_comes_back(number):
    def former(*_):
        pytest.fail("the former handler was called")

    before = signal.signal(number, former)  # under nohup one of them is ignored
    try:
        with StopRequest() as stop:
            assert not stop
            os.kill(os.getpid(), number)
            assert stop
            assert stop.received == signal.Signals(number).name
        assert signal.getsignal(number) is former
    finally:
        signal.signal(number, before)


def test_a_second_interrupt_stops_at_once():
    def interrupt_twice():
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_the_first_signal_is_the_reason():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == "SIGUSR1"


@pytest.mark.parametrize("number", ASKING)
def test_what_is_ignored_stays_so(number):
    former = signal.signal(number, signal.SIG_IGN)  # as nohup does, or a shell with what runs in the background
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert not stop
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, former)


def test_a_handler_that_python_did_not_install_is_left_alone(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        patched.setattr(signal, "signal", lambda number, handler: pytest.fail("replaced, and not to be given back"))
        with StopRequest():
            pass


def test_a_process_that_was_started_is_told_once_and_is_missed_whatever_its_status(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], stdout=-1)
    monkeypatch.setattr(signals, "started", [child])
    child.stdout.read(1)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGUSR1)
        assert child.wait(30) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)  # nobody is there
    child.returncode = 0
    assert StopRequest()


def test_at_a_terminal_the_first_interrupt_is_acknowledged_once(monkeypatch):
    written = []
    monkeypatch.setattr(os, "isatty", lambda number: number == 2)
    monkeypatch.setattr(os, "write", lambda number, text: written.append((number, text)))
    with StopRequest("stopping soon") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop
    with StopRequest("stopping soon"):
        os.kill(os.getpid(), signal.SIGTERM)  # nobody pressed a key
    assert written == [(2, b"\nstopping soon\n")]
