# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""`python -m trainer prepare`: conversations as the target's tokens, once, in a folder that trainings read from.

    prepared = prepared_data("train.jsonl", tokenizer, into=run_dir / "prepared" / "train")

Of the target only tokenizer and generation config are loaded. The source is read as a stream and each document written
at once, so that memory does not grow with it. The folder is built beside its place and renamed when it is whole: what
a killed prepare leaves is not taken for data. The same source makes the same bytes with any number of workers.

Records that are no conversation are left out and reported; more than a tenth of them stops the preparation.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np

from trainer.arguments import at_least_one
from trainer.chat import tokens_of
from trainer.files import built_beside
from trainer.interrupts import Interrupted, interrupts
from trainer.locks import Locked
from trainer.prepared import META, DataError, Fingerprint, Prepared, Settings, open_prepared
from trainer.prepared import Source as SourceMark
from trainer.prepared_writer import SHOWN, Reasons, Writer
from trainer.sources import NAMED, Source, open_source
from trainer.tokenise import Check, outcomes

MOST_BAD = 0.1  # share of records that can't be used above which a source is refused
HOPELESS = 1000  # as many bad records, if they are the half of all so far, end the reading early
INLINE_BYTES = 32 * 2**20  # a smaller source is not worth the start of workers
TICK_S = 10.0  # seconds between two lines of progress

PROBE = "Straße, naïve; 3.14159 = π\n\n\tdef f(x):  return x**2  # 日本語 ﬁ é 🙂 <|x|>\r\n"

Say = Callable[[str], None]


def prepared_data(
    path: Path | str,
    tokenizer: Any,
    *,
    into: Path,
    last_turn_only: bool = False,
    end_tokens: Collection[int] = (),
    vocab_size: int | None = None,
    workers: int | None = None,
    say: Say = lambda _: None,
    progress: Say = lambda _: None,
    check: Check = lambda: None,
) -> Prepared:
    """Data of a config, prepared: the folder that `path` names, or one made of it in `into`, if it isn't there yet.

    end_tokens: those that end the target's answers, beside the tokenizer's own; vocab_size: the target's. workers None:
    as the source's size suggests. `say` gets what was read, left out and why, a line each. `check` is called again and
    again; it may raise what ends the preparation, of which nothing stays.

    Raises Locked: another process is making this folder. Raises DataError: the data can't be read, has more than 10%
    bad records or nothing to learn from; the tokenizer has no chat template; the data was prepared for another
    tokenizer, or has a token that the target hasn't.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the target's tokenizer has no chat template, so its conversations can't be written as it saw them"
        )
    path, into = Path(path).expanduser(), into.expanduser().resolve()  # a link stays, what it leads to is replaced
    check()
    mark = fingerprint(tokenizer)
    ends = sorted({int(end) for end in (tokenizer.eos_token_id, *end_tokens) if end is not None})
    settings = Settings(last_turn_only=last_turn_only, end_tokens=tuple(ends))
    if (path / META).is_file():
        prepared = open_prepared(path, check=check)
        check_made_for(prepared, mark, settings)
    else:
        source = open_source(path)
        if source.listed:
            say(source.listed)
        prepared = reusable(into, source, mark, settings, check)
        if prepared is None:
            try:
                write(source, tokenizer, into, mark, settings, workers or suggested_workers(source), progress, check)
            except Locked:
                raise
            except OSError as error:  # a full disk does not say where
                raise DataError(f"prepared data can't be written to {into}: {error.strerror or error}") from error
            prepared = open_prepared(into, check=check)
    highest = int(np.flatnonzero(prepared.counts).max(initial=0))
    if vocab_size is not None and highest >= vocab_size:
        raise DataError(
            f"data {path} has the token {highest} ({prepared.first_place_of(highest)}), but the target knows "
            f"{vocab_size} tokens only: its tokenizer is not its own"
        )
    for line in prepared.report:
        say(line)
    return prepared


def fingerprint(tokenizer: Any) -> Fingerprint:
    """What a tokenizer does, not how a library's version stores it: vocabulary, template, a text of hard cases."""
    vocabulary = cast("dict[str, int]", tokenizer.get_vocab())
    facts = [sorted(vocabulary.items()), tokenizer.chat_template, tokenizer.eos_token_id, tokens_of(tokenizer, PROBE)]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return Fingerprint(digest=digest, vocabulary=max(vocabulary.values()) + 1)


def check_made_for(prepared: Prepared, mark: Fingerprint, settings: Settings) -> None:
    """Raises DataError when a folder was prepared for another tokenizer or with other settings."""
    theirs = prepared.meta.tokenizer
    if theirs != mark:
        raise DataError(
            f"prepared data {prepared.folder} is of another tokenizer than the target's: {theirs.vocabulary} tokens, "
            f"fingerprint {theirs.digest[:12]}; the target's has {mark.vocabulary}, fingerprint {mark.digest[:12]}"
        )
    for name in Settings.model_fields:
        found, wanted = getattr(prepared.meta.settings, name), getattr(settings, name)
        if found != wanted:
            raise DataError(
                f"prepared data {prepared.folder} was made with {name} {found}, this training wants {wanted}: prepare "
                "it again"
            )


def check_path(path: Path | str) -> None:
    """That data is there and of a kind that can be read, as far as a look tells. Raises DataError."""
    path = Path(path).expanduser()
    if (path / META).is_file():
        open_prepared(path, verify=False)
    else:
        open_source(path)


def reusable(
    into: Path, source: Source, mark: Fingerprint, settings: Settings, check: Check = lambda: None
) -> Prepared | None:
    """What lies in `into`, if it is whole and was made of just this. Raises DataError when it is something else."""
    if not into.exists() or (into.is_dir() and not any(into.iterdir())):
        return None
    if not (into / META).is_file():
        raise DataError(f"{into} is not prepared data: it will not be replaced")
    try:
        found = open_prepared(into, verify=False)
        if found.meta.tokenizer != mark or found.meta.settings != settings:
            return None
        if found.meta.source.digest != source.digest(check):
            return None
        found.verify(check)
    except DataError:
        return None
    return found


def suggested_workers(source: Source) -> int:
    small = source.bytes < INLINE_BYTES
    return 1 if small else min(8, len(os.sched_getaffinity(0)))


# --- onto the disk ---


def write(
    source: Source,
    tokenizer: Any,
    folder: Path,
    mark: Fingerprint,
    settings: Settings,
    workers: int,
    progress: Say = lambda _: None,
    check: Check = lambda: None,
) -> None:
    """Prepares a source into a folder; after an error the folder is as it was. Raises DataError."""
    reasons = Reasons()
    records = 0
    said = time.monotonic()
    with built_beside(folder) as building, ExitStack() as closing:
        before = [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
        digest = source.digest(check)
        writer = Writer(building, mark.vocabulary)
        closing.callback(writer.close)
        for found in outcomes(source.records(), tokenizer, settings, workers, check):
            check()
            records += len(found)
            for line, outcome in found:
                if isinstance(outcome, str):
                    reasons.add(line, outcome)
            writer.add([(line, outcome) for line, outcome in found if not isinstance(outcome, str)])
            if reasons.count >= HOPELESS and 2 * reasons.count > records:
                break
            if time.monotonic() - said >= TICK_S:
                said = time.monotonic()
                progress(
                    f"{source.name}: {records:,} records, {writer.documents:,} documents, {writer.tokens:,} tokens"
                )
        name = SourceMark(
            name=source.name,
            digest=digest,
            files=tuple(source.starts),
            unread=len(source.unread),
            unread_names=tuple(source.unread[:NAMED]),
        )
        if reasons.count > MOST_BAD * records:
            raise DataError(f"data {source.path}: {refusal(name, reasons, records)}")
        if not writer.documents:
            raise DataError(f"data {source.path}: no conversation to learn from in {records:,} records")
        if before != [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]:
            raise DataError(f"data {source.path} changed while it was read: prepare it again")
        writer.finish(name, mark, settings, records, reasons)


def refusal(source: SourceMark, reasons: Reasons, records: int) -> str:
    """Why a source with too many bad records is refused."""
    shown = [
        f"{one.count:,} times: {one.reason} ({', '.join(map(source.place, one.lines))}"
        f"{', ...' * (one.count > len(one.lines))})"
        for one in reasons.all()[:SHOWN]
    ]
    return f"{reasons.count:,} of {records:,} records can't be used; {'; '.join(shown)}"


# --- the command ---


def load_tokenizer(name: str) -> tuple[Any, list[int]]:
    """A target's tokenizer and the tokens that end its answers. Raises DataError."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    if name.startswith("~"):
        name = str(Path(name).expanduser())
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        try:
            generation = GenerationConfig.from_pretrained(name)
        except OSError:  # without one, transformers makes it of the model's config
            generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name))
    except Exception as error:  # transformers raises what it likes
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"the tokenizer of {name} can't be loaded: {why}") from error
    ends = cast("int | list[int] | None", generation.eos_token_id)
    return tokenizer, ends if isinstance(ends, list) else [] if ends is None else [ends]


def vocabulary_size(name: str) -> int | None:
    """How many tokens the target itself knows, by its config; None when that doesn't say it."""
    from transformers import AutoConfig

    from trainer.refused import text_config

    try:
        return int(text_config(AutoConfig.from_pretrained(str(Path(name).expanduser()))).vocab_size)
    except Exception:  # transformers raises what it likes; a training tells
        return None


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m trainer prepare", description="Conversations as a target's tokens, once, for trainings to read."
    )
    parser.add_argument("source", type=Path, help="JSON lines (.jsonl, .jsonl.gz), Parquet, or a folder of them")
    parser.add_argument("--target", required=True, help="folder or hub name of the target model")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; prepared data there is replaced")
    parser.add_argument("--last-turn-only", action="store_true", help="learn from each conversation's last answer only")
    parser.add_argument("--workers", type=at_least_one, metavar="N", help="processes (as many as the size suggests)")
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """0; 128 and the signal's number after one that ended it. Raises ValueError or OSError on bad input."""
    options = _arguments(words)
    if (options.source / META).is_file():
        raise DataError(f"{options.source} is prepared data already: name it in a config as it is")
    check_path(options.source)
    try:
        with interrupts() as check:
            tokenizer, ends = load_tokenizer(options.target)
            prepared = prepared_data(
                options.source,
                tokenizer,
                into=options.out,
                last_turn_only=options.last_turn_only,
                end_tokens=ends,
                vocab_size=vocabulary_size(options.target),
                workers=options.workers,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                progress=lambda line: print(f"prepare: {line}", file=sys.stderr, flush=True),
                check=check,
            )
    except Interrupted as interrupt:
        print(f"prepare: stopped by {interrupt}; nothing was made", file=sys.stderr)
        return 128 + interrupt.number
    meta = prepared.meta
    if options.json:
        print(json.dumps({"folder": str(prepared.folder), **meta.model_dump(mode="json")}))
    else:
        print(
            f"{prepared.folder}: {meta.documents:,} documents of {meta.records:,} records, {meta.tokens:,} tokens, "
            f"{meta.learned:,} of them the assistant's"
        )
    return 0
