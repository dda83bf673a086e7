"""Interrupts: none is lost, and other handlers are left alone."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest

from sac_search import interrupts


def drop_an_interrupt() -> None:
    """Raises SIGINT where Python drops the exception."""

    class Victim:
        pass

    victim = Victim()
    kept = weakref.ref(victim, lambda _: signal.raise_signal(signal.SIGINT))
    del victim
    assert kept() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_dropped_is_raised_again() -> None:
    with interrupts.listening(signal.SIGINT):
        drop_an_interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_if_unseen()
        interrupts.acknowledge()
        interrupts.raise_if_unseen()


def test_a_second_interrupt_counts_anew() -> None:
    with interrupts.listening(signal.SIGINT, signal.SIGTERM):
        for number in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            interrupts.acknowledge()


def test_nothing_is_left_behind() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.listening(signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    interrupts.raise_if_unseen()


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda number, frame: None])
def test_handlers_of_others_are_left_alone(theirs: signal.Handlers) -> None:
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with interrupts.listening(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) == theirs
        assert signal.getsignal(signal.SIGTERM) == theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_inside_another_listener_the_outer_one_stays() -> None:
    with interrupts.listening(signal.SIGINT):
        handler = signal.getsignal(signal.SIGINT)
        with interrupts.listening(signal.SIGINT):
            assert signal.getsignal(signal.SIGINT) == handler
        assert signal.getsignal(signal.SIGINT) == handler


def test_other_threads_change_nothing() -> None:
    seen = []

    def listen() -> None:
        with interrupts.listening(signal.SIGINT):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_one_that_is_put_off_is_raised_in_the_end() -> None:
    done = []

    def work() -> None:
        with interrupts.put_off():
            with interrupts.put_off():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with interrupts.listening(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_a_second_one_is_not_put_off() -> None:
    with interrupts.listening(signal.SIGINT), interrupts.put_off():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.acknowledge()


def test_where_it_is_allowed_it_is_not_put_off() -> None:
    done = []

    def work() -> None:
        with interrupts.allowed():
            done.append("begun")
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    with interrupts.listening(signal.SIGINT), interrupts.put_off():
        with pytest.raises(KeyboardInterrupt):
            work()
        interrupts.acknowledge()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            work()  # one was waiting, so it does not even begin
        interrupts.acknowledge()
        signal.raise_signal(signal.SIGINT)
        interrupts.acknowledge()
    assert done == ["begun"]


def test_another_threads_work_puts_nothing_off() -> None:
    def hold() -> None:
        with interrupts.put_off(), interrupts.allowed(), interrupts.put_off():
            begun.set()
            ended.wait(10)

    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    with interrupts.listening(signal.SIGINT):
        thread.start()
        begun.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        ended.set()
        thread.join()
