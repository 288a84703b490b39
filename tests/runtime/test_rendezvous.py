"""Processes that wait for each other: here threads, each with a connection of its own."""

import socket
import threading
import time

import pytest

from jgesr_lightning.runtime import rendezvous
from jgesr_lightning.runtime.environment import Seat
from jgesr_lightning.runtime.rendezvous import Meeting, MeetingError
from jgesr_lightning.runtime.signals import StopRequest


def seat_at(port, rank, launcher="torchrun"):
    return Seat(launcher, rank, rank, 0, 3, 1, "127.0.0.1", port)


@pytest.fixture
def first():
    """The first of three processes, at a free port that nobody else can reach."""
    return Meeting(Seat(), 3, StopRequest())


def others(first, action):
    """Let the other two processes do something, in threads."""
    threads = [threading.Thread(target=action, args=(seat_at(first.port, rank),)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    return threads


def test_everybody_waits_for_the_last(first):
    times = {}

    def come(seat):
        meeting = Meeting(seat, 3, StopRequest())
        time.sleep(0.2 * seat.rank)
        meeting.wait("here", 20)
        times[seat.rank] = time.monotonic()

    start = time.monotonic()
    threads = others(first, come)
    first.wait("here", 20)
    times[0] = time.monotonic()
    for thread in threads:
        thread.join()
    assert sorted(times) == [0, 1, 2]
    assert min(times.values()) - start >= 0.4


def test_who_does_not_come_is_named_after_the_limit(first):
    others(first, lambda seat: seat.rank == 1 and Meeting(seat, 3, StopRequest()).store.add("here", 1))
    with pytest.raises(MeetingError, match=r"^process 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 0\.3 s"):
        first.wait("here", 0.3)


@pytest.mark.parametrize(("received", "error"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", MeetingError)])
def test_a_signal_ends_the_wait_at_once(first, received, error):
    looks = []

    def comes_meanwhile():
        looks.append(received)
        first.stop.received = received if len(looks) == 3 else None
        return ""

    with pytest.raises(error, match="stopped by SIGTERM" if error is MeetingError else None):
        first.wait("here", 60, lost=comes_meanwhile)
    assert len(looks) == 3  # none after it


def test_a_process_that_ended_ends_the_wait_at_once(first):
    with pytest.raises(MeetingError, match="process 1 ended with status 2"):
        first.wait("here", 60, lost=lambda: "process 1 ended with status 2 before all had met")


def test_the_first_process_is_waited_for_until_the_limit(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.3)
    with pytest.raises(MeetingError, match=rf"cannot be reached at 127\.0\.0\.1:{port} \(.*refused"):
        Meeting(seat_at(port, 1), 3, StopRequest())
    stop = StopRequest()
    stop.received = "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        Meeting(seat_at(port, 1), 3, stop)


def test_something_else_at_the_port_is_named(monkeypatch):
    def answer(server):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        with pytest.raises(MeetingError, match="is no run of this program"):
            Meeting(seat_at(server.getsockname()[1], 1), 3, StopRequest())


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MeetingError, match=f"port {port}, where the processes are to meet.*set MASTER_PORT"):
            Meeting(seat_at(port, 0), 3, StopRequest())


def test_only_this_machine_can_reach_a_run_of_its_own_processes():
    with rendezvous.listen(Seat()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with rendezvous.listen(seat_at(None, 0, "srun")) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
