import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.training.signals import Stop

WAITS = """
import time
from jaxscale.training.signals import Stop
with Stop() as stop:
    print("ready", flush=True)
    while not stop.signal_name:
        time.sleep(0.01)
    print(stop.signal_name, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", Stop.SIGNALS)
def test_the_first_signal_is_noted_and_the_handlers_come_back(number):
    before = [signal.getsignal(n) for n in Stop.SIGNALS]
    with Stop() as stop:
        assert stop.signal_name == ""
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name
    assert [signal.getsignal(n) for n in Stop.SIGNALS] == before


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
def test_a_second_signal_ends_at_once(first, second):
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[first])
        assert process.stdout.readline() == f"{first}\n"
        process.send_signal(signal.Signals[second])
        assert process.wait(30) == -signal.Signals[second]


NOTEBOOK = """
import sys, time
from jaxscale.training.signals import Stop
sys.modules["ipykernel"] = sys
try:
    with Stop() as stop:
        print("ready", flush=True)
        while not stop.signal_name:
            time.sleep(0.01)
        print(stop.signal_name, flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("left", flush=True)
"""


def test_in_a_notebook_a_second_interrupt_leaves_the_kernel_alive():
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True) as process:
        for expected in ("ready\n", "SIGINT\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "left\n"
        assert process.wait(30) == 0


def test_another_thread_sets_no_handler():
    found = []

    def run():
        with Stop() as stop:
            found.append(stop.signal_name)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [""]


DEAF = """
import ctypes, os
from jaxscale.training.signals import Stop
def end_process(name):
    os.write(1, f"ended by {name}".encode())
    os._exit(75)
mutex = ctypes.create_string_buffer(128)
library = ctypes.CDLL(None)
with Stop(end_process):
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # waits for itself, in C, where no handler of Python runs
"""


def test_a_thread_ends_a_process_whose_main_thread_is_in_c():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # until it waits
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(10) == 75
            assert process.stdout.read() == "ended by SIGTERM"
        finally:
            process.kill()
