"""`python -m trainer chat`: talk with a target through its drafter, and see which tokens the drafter gave.

On a terminal it reads line by line; with --prompt, or words on stdin, it answers once. The answer goes to stdout as it
comes, all else to stderr. Ctrl-C ends an answer and keeps what was said of it; Ctrl-D ends the talk.
"""

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from trainer.arguments import at_least_one
from trainer.chat import prompt_tokens
from trainer.conversations import text_of
from trainer.draft import DraftModel
from trainer.evaluate import add_models, add_sampling, in_colour, load_models
from trainer.rejection import Sampling, seeded_sampling
from trainer.speculate import SpeculativeDecoding
from trainer.stream import DIM, RESET, Pieces, coloured, printable
from trainer.target import TargetModel
from trainer.turns import answer_text

LIMIT = 512  # tokens of an answer, where the target has room for them
INTERRUPTED_CODE = 130


class TooLong(ValueError):
    """What was said leaves no room for an answer, even without all that came before."""


@dataclass(frozen=True)
class Said:
    """How an answer went."""

    tokens: int
    cycles: int
    a_cycle: float  # tokens; nan without a cycle
    tokens_per_s: float | None
    how: str  # it ended: "", or what cut it

    def __str__(self) -> str:
        line = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        if self.cycles:
            line += f", {self.a_cycle:.2f} a cycle"
        if self.tokens_per_s is not None:
            line += f", {self.tokens_per_s:.1f} tokens/s"
        return line + (f", {self.how}" if self.how else "")


class Talk:
    """What has been said so far, as far as it still fits into the target's positions."""

    def __init__(
        self, target: TargetModel, drafter: DraftModel, limit: int, system: str | None, sampling: Sampling | None
    ) -> None:
        """limit: tokens of an answer, at most. Raises ValueError when the target has no room for it."""
        self._target, self._drafter, self._limit, self._sampling = target, drafter, limit, sampling
        self._room = target.longest - limit - drafter.config.block_size  # for a prompt
        if self._room < 1:
            raise ValueError(f"--max-new-tokens {limit}: with a block it must be less than {target.longest}")
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []  # the user's and the assistant's, by turns

    def ask(self, text: str) -> int:
        """Takes what the user says; returns how many earlier turns were forgotten to make room.

        Raises TooLong, or ValueError when it is no text or the chat template refuses it; nothing was said then.
        """
        message = {"role": "user", "content": text_of(text, "message")}
        turns, forgotten = self._turns, 0
        while len(prompt := self._tokens([*turns, message])) > self._room:
            if not turns:
                raise TooLong(f"{len(prompt)} tokens are too many: {self._room} leave room for an answer")
            turns, forgotten = turns[2:], forgotten + 1
        self._turns = [*turns, message]
        return forgotten

    def answer(self, show: Callable[[str, bool], None], stopped: Callable[[], bool]) -> Said:
        """Answers what was asked last; `show` gets each piece of text, and whether it was drafted."""
        tokenizer, prompt = self._target.tokenizer, self._tokens(self._turns)
        decoding = SpeculativeDecoding(self._target, self._drafter, prompt, self._limit, sampling=self._sampling)
        stream, shown = Pieces(tokenizer), 0
        while True:
            for token, drafted in zip(decoding.tokens[shown:], decoding.drafted[shown:], strict=True):
                for piece, proposed in stream.add(token, drafted):
                    show(piece, proposed)
            shown = len(decoding.tokens)
            if decoding.full or stopped():
                break
            decoding.cycle()
        if rest := stream.rest():
            show(rest, False)
        decoded = decoding.decoded()
        self._turns.append({"role": "assistant", "content": answer_text(self._target, decoded.tokens)})
        ended = bool(decoded.tokens) and decoded.tokens[-1] in self._target.end_tokens()
        how = "" if ended else f"cut at {self._limit} tokens" if decoding.full else "stopped"
        speed = (len(decoded.tokens) - 1) / decoded.seconds if decoded.seconds > 0 else None
        return Said(len(decoded.tokens), len(decoded.accepted), decoded.acceptance, speed, how)

    def _tokens(self, turns: Sequence[dict[str, str]]) -> list[int]:
        return prompt_tokens(self._target.tokenizer, [*self._system, *turns])


@contextlib.contextmanager
def ctrl_c() -> Generator[threading.Event]:
    """Inside, the first Ctrl-C sets the event; a second one acts as usual."""
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        came.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def answer_once(talk: Talk, text: str, show: Callable[[str, bool], None], note: Callable[[str], None]) -> bool:
    """One question and its answer; False when Ctrl-C cut it. Raises ValueError when it can't be asked."""
    if forgotten := talk.ask(text):
        turns = "turn no longer fits and was" if forgotten == 1 else f"{forgotten} turns no longer fit and were"
        note(f"the oldest {turns} forgotten")
    with ctrl_c() as stopped:
        said = talk.answer(show, stopped.is_set)
        sys.stdout.write("\n")
        sys.stdout.flush()
        note(str(said))
        return not stopped.is_set()


def converse(talk: Talk, show: Callable[[str, bool], None], note: Callable[[str], None]) -> None:
    """Line by line, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` its line editing
    note("green is what the drafter gave; Ctrl-C ends an answer, Ctrl-D the talk")
    while True:
        try:
            text = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        except UnicodeDecodeError as error:
            note(f"not UTF-8: {error.reason}")
            continue
        if not text.strip():
            continue
        try:
            answer_once(talk, text, show, note)
        except ValueError as error:  # too long, no text, or refused by the chat template
            note(str(error))


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m trainer chat", description="Talk with a target through its drafter.")
    add_models(parser)
    parser.add_argument("--prompt", help="answer this and end; without it, what stdin holds, or a talk on a terminal")
    parser.add_argument("--system", help="the system's words at the begin")
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, help=f"tokens of an answer at most ({LIMIT}, or half of the target's)"
    )
    add_sampling(parser)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """0; 130 when Ctrl-C cut the only answer. Raises ValueError or OSError on bad input."""
    options = _arguments(words)
    text: str | None = options.prompt
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.buffer.read().decode().strip()
    if text is not None and not text.strip():
        raise ValueError("nothing is asked: --prompt and stdin are empty")
    target, drafter, _ = load_models(options)
    limit = options.max_new_tokens or min(LIMIT, target.longest // 2)
    how = seeded_sampling(options.temperature, options.top_p, options.seed, target.device)
    talk = Talk(target, drafter, limit, options.system, how)
    colour, terminal = in_colour(options), sys.stdout.isatty()
    dim = colour and sys.stderr.isatty()

    def show(piece: str, drafted: bool) -> None:
        piece = printable(piece) if terminal else piece
        sys.stdout.write(coloured([(piece, drafted)]) if colour else piece)
        sys.stdout.flush()

    def note(line: str) -> None:
        print(f"{DIM}[{line}]{RESET}" if dim else f"[{line}]", file=sys.stderr, flush=True)

    if text is None:
        converse(talk, show, note)
        return 0
    return 0 if answer_once(talk, text, show, note) else INTERRUPTED_CODE
