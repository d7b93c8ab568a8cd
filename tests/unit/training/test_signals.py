import math
import os
import signal
import subprocess
import sys
import threading

import pytest

from cdc_plugin.cli.common import run_command
from cdc_plugin.cli.refine import refine_parser
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import UserError
from cdc_plugin.training import signals
from cdc_plugin.training.signals import Terminated, ending_on_termination, noticing_termination

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a process cannot send itself SIGTERM here")


@pytest.fixture(autouse=True)
def _no_echo_and_no_handler_is_left(monkeypatch):
    """Signals of tests that follow each other at once are no echoes."""
    monkeypatch.setattr(signals, "ECHO", 0.0)
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in signals.SIGNALS} == before
    signals._heard[0] = -math.inf


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_the_first_signal_is_noted_and_the_second_ends(number):
    with pytest.raises(Terminated, match=signal.Signals(number).name), noticing_termination() as notice:  # noqa: PT012
        assert not notice.asked
        tell(number)
        assert notice.asked
        tell(number)
        pytest.fail("the second signal was not heard")


def test_who_was_asked_and_does_not_end_is_ended_on_leaving_unless_by_another_error():
    reached = []
    with noticing_termination() as notice:
        notice.end()  # nobody has asked
    with pytest.raises(Terminated), noticing_termination():  # noqa: PT012
        tell()
        reached.append("the end")
    assert reached == ["the end"]
    with pytest.raises(UserError, match="disk full"), noticing_termination():  # noqa: PT012
        tell()
        raise UserError("disk full")


def test_a_signal_that_two_senders_pass_on_counts_once_and_does_not_disturb_the_way_out(monkeypatch):
    monkeypatch.setattr(signals, "ECHO", 60.0)
    with pytest.raises(Terminated), noticing_termination() as notice:  # noqa: PT012
        tell()
        tell()
        tell(signals.SIGNALS[-1])
        assert notice.number == signal.SIGTERM
        signals._heard[0] -= 61  # a minute later somebody has lost patience
        tell()
        pytest.fail("the late signal was not heard")
    signals._heard[0] = -math.inf
    tidied = []
    with pytest.raises(Terminated), ending_on_termination():  # noqa: PT012
        try:
            with noticing_termination() as notice:
                tell()
                notice.end()
        finally:
            tell()
            tidied.append("up")
    assert tidied == ["up"]


def test_outside_of_training_a_signal_ends_at_once_and_half_a_file_is_removed(tmp_path):
    def write(path):
        path.write_text("half")
        tell()

    (tmp_path / "last.pt").write_text("earlier")
    with pytest.raises(Terminated), ending_on_termination():
        write_atomically(tmp_path / "last.pt", write)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    assert (tmp_path / "last.pt").read_text() == "earlier"


def test_training_takes_over_from_the_command_and_gives_back():
    with pytest.raises(Terminated), ending_on_termination():  # noqa: PT012
        with noticing_termination() as notice:
            pass
        assert not notice.asked
        try:
            tell()
        except Exception:
            pytest.fail("taken for an error")
        pytest.fail("the signal was not heard")


def test_handlers_of_a_script_and_ignored_signals_are_left_alone_and_other_threads_touch_nothing():
    heard = []
    for handler in (lambda number, frame: heard.append(number), signal.SIG_IGN):
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with ending_on_termination(), noticing_termination() as notice:
                tell()
                assert signal.getsignal(signal.SIGTERM) is handler
            assert not notice.asked
        finally:
            signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    seen = []

    def work():
        with ending_on_termination(), noticing_termination() as notice:
            seen.append((notice.asked, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "interrupted"), *((number, f"stopped by {number.name}") for number in signals.SIGNALS)],
)
def test_a_command_that_is_told_to_end_says_so_in_one_line(number, words, capsys, request):
    # A shell has background jobs ignore the keyboard; the tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(SystemExit) as end, run_command(refine_parser(), ["--resume"], "continue with"):
        tell(number)
    assert end.value.code == 128 + number
    assert capsys.readouterr().err.splitlines() == [f"cdc-refine: {words}; continue with: cdc-refine --resume"]


CHILD = """
import os, sys, time
from cdc_plugin.training import signals
print(os.getpid(), flush=True)
sys.stdin.readline()  # all the rest comes after the parent's end
signals.end_with_parent()
time.sleep(30)
print("still there", flush=True)
"""
FORKED = """
import os, sys, time
from cdc_plugin.training import signals
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signals.end_with_parent()
time.sleep(1)
os._exit(5)
"""


def test_a_process_ends_whose_parent_was_gone_before_it_could_watch():
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    command, pipe = [sys.executable, "-c", start, CHILD], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.wait()
        print("continue", file=parent.stdin, flush=True)
        assert parent.stdout.read() == ""  # the child has ended, and said nothing more


def test_a_forked_process_watches_the_one_that_forked_it():
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60, check=False).returncode == 5
