"""`python -m trainer chat`: a talk's memory, what is shown of an answer, and the real command on a real terminal."""

import contextlib
import io
import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nursery import Nursery
from tiny_checkpoints import save_drafter
from tiny_targets import drafter_for, tiny_target
from torch import Tensor

from trainer.__main__ import main
from trainer.draft import DraftCache, DraftModel
from trainer.speculate import decode_plain
from trainer.stream import GREEN, RESET
from trainer.talk import Talk, TooLong
from trainer.target import TargetModel


def talk_of(limit: int = 8, system: str | None = None, block: int = 4, **changes: int) -> tuple[Talk, TargetModel]:
    target = tiny_target(**changes)
    torch.manual_seed(0)
    return Talk(target, drafter_for(target, block=block), limit, system, None), target


def never() -> bool:
    return False


def prompt_of(talk: Talk, target: TargetModel) -> str:
    return target.tokenizer.decode(talk._tokens(talk._turns))


def test_a_talk_remembers_what_both_said() -> None:
    talk, target = talk_of(system="Be brief.")
    shown: list[str] = []
    assert talk.ask("one") == 0
    said = talk.answer(lambda text, _: shown.append(text), never)
    first = prompt_of(talk, target)
    answer = first.removeprefix(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.startswith("".join(shown)) and said.tokens == 8
    talk.ask("two")
    assert prompt_of(talk, target).endswith("<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_of(talk, target).startswith(first.removesuffix("<|im_start|>assistant\n"))


def test_an_answer_is_the_target_s_own_and_its_drafted_tokens_are_named() -> None:
    target = tiny_target()
    target.head_weight.copy_(torch.nn.functional.normalize(target.head_weight, dim=-1))
    prompt = target.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    plain = decode_plain(target, prompt, 9)
    text = prompt + plain.tokens

    class Foreseeing(DraftModel):
        """Knows the answer but for every third token."""

        def forward_cached(self, features_new: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
            block = positions[0, features_new.shape[1] :].tolist()
            known = [text[place] + (place % 3 == 0) if place < len(text) else 4 for place in block]
            return target.head_weight[torch.tensor(known)][None]

    drafter = Foreseeing(target.draft_config(1, 4, (1, 2, 3)))
    talk = Talk(target, drafter, 9, None, None)
    talk.ask("hi")
    shown: list[tuple[str, bool]] = []
    said = talk.answer(lambda piece, drafted: shown.append((piece, drafted)), never)
    assert "".join(piece for piece, _ in shown) == target.tokenizer.decode(plain.tokens, skip_special_tokens=True)
    places = range(len(prompt), len(text))
    own = [place == len(prompt) or place % 3 == 0 for place in places]  # the prompt's pass gives the first
    assert len(shown) == len(places) and [not drafted for _, drafted in shown][1:-1] == own[1:-1]
    assert said.how == "cut at 9 tokens" and str(said).startswith("9 tokens, 3.00 a cycle, ")


def test_what_no_longer_fits_is_forgotten_from_the_oldest_turn_on() -> None:
    talk, target = talk_of(limit=8, system="S", max_position_embeddings=160)
    forgotten = []
    for number in range(6):
        forgotten.append(talk.ask(f"question {number}"))
        talk.answer(lambda *_: None, never)
    assert forgotten[:2] == [0, 0] and sum(forgotten) >= 2
    said = prompt_of(talk, target)
    assert said.startswith("<|im_start|>system\nS<|im_end|>\n") and "question 0" not in said and "question 5" in said
    # What was forgotten was a whole turn: the user's words come first.
    assert re.match(r"<\|im_start\|>system\nS<\|im_end\|>\n<\|im_start\|>user\nquestion \d", said)


def test_words_that_do_not_fit_at_all_are_refused_and_not_remembered() -> None:
    talk, target = talk_of(max_position_embeddings=160)
    talk.ask("short")
    talk.answer(lambda *_: None, never)
    before = prompt_of(talk, target)
    with pytest.raises(TooLong, match=r"\d+ tokens are too many: 148 leave room"):
        talk.ask("x" * 200)
    with pytest.raises(ValueError, match="half a character"):
        talk.ask("\udcff")
    assert prompt_of(talk, target) == before
    with pytest.raises(ValueError, match="must be less than 160"):
        talk_of(limit=156, max_position_embeddings=160)


def test_a_stopped_answer_is_kept_as_far_as_it_went() -> None:
    talk, target = talk_of(limit=60)
    talk.ask("hi")
    shown: list[str] = []
    said = talk.answer(lambda text, _: shown.append(text), lambda: len(shown) > 5)
    assert said.how == "stopped" and 5 < said.tokens < 15
    assert "".join(shown) in prompt_of(talk, target)


# --- the command ---


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line for a random target of 1,024 positions that never ends an answer by itself, and a drafter."""
    target = tiny_target()
    target.model.generation_config.eos_token_id = 0
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    model = drafter_for(target, block=4)
    save_drafter(tmp_path / "drafter", model)
    return f"chat --target {tmp_path}/target --drafter {tmp_path}/drafter".split()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def type_in(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    return type_in


def test_one_answer_goes_to_stdout_and_nothing_else(
    words: list[str], typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--prompt", "hi", "--max-new-tokens", "9"]) == 0
    first = capsys.readouterr()
    assert first.out.count("\n") >= 1 and GREEN not in first.out and first.err.startswith("[9 tokens, ")
    typed(b"hi\n")
    assert main([*words, "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == first.out
    assert main([*words, "--prompt", "hi", "--max-new-tokens", "9", "--color"]) == 0
    coloured = capsys.readouterr().out
    assert coloured.replace(GREEN, "").replace(RESET, "") == first.out


def test_a_seed_draws_the_same_answer_again(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[str] = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--prompt", "hi", "--temperature", "2", "--seed", seed, "--max-new-tokens", "30"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(("text", "reason"), [(b" \n", "nothing is asked"), (b"\xff", "invalid start byte")])
def test_nothing_to_answer_is_one_line(
    words: list[str],
    typed: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
    text: bytes,
    reason: str,
) -> None:
    typed(text)
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and reason in said.err


ON_A_TERMINAL = """
import os, signal, sys

terminal = os.open(sys.argv.pop(1), os.O_RDWR)  # the first one that a session opens is its own: Ctrl-C there ends it
for number in range(3):
    os.dup2(terminal, number)
sys.stdin = open(0, encoding="utf-8")
sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1) for number in (1, 2))
signal.signal(signal.SIGINT, signal.default_int_handler)
from trainer.__main__ import leave, main
leave(main())
"""


class Terminal:
    """A trainer on a terminal of its own."""

    def __init__(self, nursery: Nursery, words: list[str]) -> None:
        ours, theirs = pty.openpty()
        self._end, self.seen = ours, ""
        self.process = nursery.start(os.ttyname(theirs), *words, code=ON_A_TERMINAL)
        try:
            self.seen = os.read(self._end, 4096).decode() if select.select([ours], [], [], 60)[0] else ""
        finally:
            os.close(theirs)  # now the trainer alone has it open, and its end is the end of what is read

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What comes up to a pattern, and with it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            if time.monotonic() > end:
                raise TimeoutError(f"no {pattern!r} in {self.seen!r}")
            ready, _, _ = select.select([self._end], [], [], 0.5)
            if ready:
                try:
                    self.seen += os.read(self._end, 4096).decode(errors="replace")
                except OSError as error:
                    raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from error
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C until the pattern comes: Python loses one that comes just before `input` waits for a key."""
        for seconds in (5, 5, 60):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                self.until(pattern, seconds)
                return
        raise AssertionError(f"Ctrl-C brings no {pattern!r}")

    def close(self) -> None:
        os.close(self._end)


def rendered(shown: str) -> str:
    """What a person sees, drafted text in brackets."""
    return shown.replace("\r", "").replace(GREEN, "⟦").replace(RESET, "⟧")


def test_a_talk_on_a_terminal(words: list[str], nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers, one of them cut by Ctrl-C, a Ctrl-C at the prompt, and Ctrl-D."""
    program = [*words, "--max-new-tokens", "900", "--temperature", "0.7"]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("INPUTRC", "/dev/null")
    terminal = Terminal(nursery, program)
    try:
        assert "green is what the drafter gave" in terminal.until(r"> ")
        terminal.type("hello\n")
        begun = terminal.until(re.escape(GREEN) + r".+?" + re.escape(RESET))
        terminal.type("\x03")
        shown = rendered(begun + terminal.until(r"\[\d+ tokens, [^\]]*\]"))
        assert shown.startswith("hello\n") and re.search(r"⟦.+⟧", shown)
        assert re.search(r"\[\d+ tokens, \d\.\d\d a cycle, [\d.]+ tokens/s, stopped\]$", shown), shown
        terminal.until(r"> ")
        terminal.interrupt(r"> ")
        terminal.type("again\n")
        terminal.until(re.escape(GREEN))
        terminal.type("\x03")
        terminal.until(r"stopped\]")
        terminal.until(r"> ")
        terminal.type("\x04")
        assert terminal.process.wait() == 0
    finally:
        terminal.close()
