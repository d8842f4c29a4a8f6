"""`parbank sample`: several texts, stop strings, and the loop that reads prompts."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parbank.cli import main as cli
from tests.cli.calls import Answer, Call


def test_several_samples_are_those_of_their_seeds(call: Call, trained: Path) -> None:
    options = ("--prompt", "def ", "--tokens", 12, "--top-p", 0.9)
    alone = [call("sample", trained, *options, "--seed", seed).out for seed in (5, 6)]
    together = call("sample", trained, *options, "--seed", 5, "--samples", 2)
    assert together.out == f"--- seed 5\n{alone[0]}--- seed 6\n{alone[1]}"
    assert together.err.count("tokens/s]") == 2


def test_a_stop_string_ends_the_text(call: Call, trained: Path) -> None:
    whole = call("sample", trained, "--tokens", 40).out.removesuffix("\n")
    stop = whole[20:23]
    cut = call("sample", trained, "--tokens", 40, "--stop", stop, "--stop", "never there")
    assert cut.out.removesuffix("\n") == whole[: whole.index(stop)]
    counts = [int(re.search(r"\[(\d+) tokens", a.err)[1]) for a in (cut, call("sample", trained, "--tokens", 40))]  # type: ignore[index]
    assert counts[0] < counts[1], "nothing is computed after it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", 0], "--samples must be at least 1, got 0"),
        (["--top-p", 0], "above 0 and at most 1"),
        (["--stop", ""], "must not be empty"),
        (["--interactive", "--prompt", "x"], "leave --prompt and --samples out"),
        (["--interactive", "--samples", 2], "leave --prompt and --samples out"),
    ],
)
def test_mistakes(call: Call, options: list, message: str) -> None:
    answer = call("sample", "x.pbk", *options)
    assert answer.code == 2
    assert message in answer.err


def interact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, lines: str) -> Answer:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(
        sys, "argv", ["parbank", "sample", str(model), "--interactive", "--tokens", "8", "--device", "cpu"]
    )
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return Answer(ended.value.code or 0, *capsys.readouterr())


def test_piped_prompts_are_answered_line_by_line(
    call: Call,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def expected(prompt: str, seed: int) -> str:
        return call("sample", trained, "--prompt", prompt, "--tokens", 8, "--seed", seed).out.removeprefix(prompt)

    texts = expected("def f", 0), expected("", 1)
    answer = interact(monkeypatch, capsys, trained, "def f\n\n")
    assert answer == Answer(0, "".join(texts), ""), "no prompt sign, no speed: what is piped is the text alone"
    assert interact(monkeypatch, capsys, trained, "def f\n/quit\nnot read\n").out == texts[0]
    assert interact(monkeypatch, capsys, trained, "") == Answer(0, "", "")
    after = interact(monkeypatch, capsys, trained, "half \udc80\n\n")
    assert "the byte 0x80, which is not UTF-8" in after.err, "a prompt that cannot be read is refused,"
    assert after.out == "\n" + texts[1], "and the next one answered"


class Terminal:
    """`parbank sample --interactive` behind a terminal of its own, driven as a person would."""

    def __init__(self, model: Path, *options: str) -> None:
        self.end, other = pty.openpty()
        command = [sys.executable, "-m", "parbank", "sample", str(model), "--interactive", "--device", "cpu", *options]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
        os.close(other)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 120) -> None:
        """Reads until the pattern is in what came since the last call."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.end, 4096).decode(errors="replace")
        self.seen = self.seen[found.end() :]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


def is_interrupted(terminal: Terminal) -> bool:
    """Sends Ctrl-C while a text is written. False if the model had ended the text by itself: it may do so at any token."""
    terminal.wait_for(r"/quit or Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("def f\n")
    terminal.wait_for(r"def f\r\n")  # the terminal's own echo
    terminal.wait_for(r"[\s\S]")
    terminal.process.send_signal(signal.SIGINT)
    try:
        terminal.wait_for(r"\[stopped\]\r\n> ", seconds=60)
    except (AssertionError, OSError):  # at the prompt Ctrl-C ends the program, and the terminal with it
        return False
    return True


def test_a_terminal_session(trained: Path) -> None:
    """Ctrl-C ends the text that is being written, and the next prompt is asked for."""
    for seed in range(10):
        terminal = Terminal(trained, "--tokens", "1000000", "--seed", str(seed))
        try:
            if is_interrupted(terminal):
                terminal.type("/quit\n")
                assert terminal.process.wait(timeout=60) == 0
                return
        finally:
            terminal.close()
    pytest.fail("ten texts ended before they could be interrupted")


def test_ctrl_c_at_the_prompt_ends_cleanly(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(question: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert interact(monkeypatch, capsys, trained, "not read\n") == Answer(0, "", "")


def test_sample_writes_the_prompt_and_goes_on(call: Call, trained: Path) -> None:
    prompt = "naïve ∞ 👩‍🚀 "
    options = ("--tokens", "8", "--prompt", prompt, "--seed", "3")
    first, again, other = (call("sample", trained, *options[:-1], seed) for seed in (3, 3, 4))
    assert first.code == 0
    assert first.out.startswith(prompt)
    assert first.out == again.out
    assert first.out != other.out
    assert re.search(r"\[\d+ tokens, \d+ tokens/s\]", first.err)
    cold = {call("sample", trained, "--tokens", 8, "--temperature", 0, "--seed", s).out for s in (1, 2)}
    assert len(cold) == 1
    assert call("sample", trained, "--tokens", 8, "--top-k", 1).out in cold
    assert call("sample", trained, "--prompt", "", "--tokens", 1).code == 0
    assert call("sample", trained / "checkpoint", "--tokens", 1).code == 0
    for option, value, message in (
        ("--tokens", 0, "at least 1"),
        ("--temperature", -1, "0 or more"),
        ("--top-k", -2, "0 (keep all) or a positive"),
        ("--seed", 10**30, "from 0 to"),
        ("--prompt", "half \udc80", "the byte 0x80, which is not UTF-8"),
    ):
        answer = call("sample", trained, option, value)
        assert answer.code == 2
        assert message in answer.err
