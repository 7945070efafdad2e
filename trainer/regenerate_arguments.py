"""The command line of `python -m trainer regenerate`."""

import argparse
from pathlib import Path

from trainer.arguments import at_least_one, at_least_zero, seconds, seconds_above_zero, share, temperature

DESCRIPTION = "Conversations whose answers the target makes itself, to train its drafter on."
NEAR = 0.8
"""The share of shingles from which on a self-prompt is a near-duplicate."""


def arguments(words: list[str]) -> argparse.Namespace:
    """What the words say; wrong ones end the process with code 2."""
    parser = argparse.ArgumentParser(
        "python -m trainer regenerate",
        description=DESCRIPTION,
        epilog="Exit codes: 0 done; 1 failed, the reason in one line; 2 wrong words; 130 Ctrl-C; 143 SIGTERM. After "
        "any of them, and after a kill, the same command goes on with what is missing.",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--data", type=Path, metavar="PATH", help="conversations to answer anew, as training reads them"
    )
    prompts.add_argument("--self-prompts", type=at_least_one, metavar="N", help="prompts that the target makes itself")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--last-turn-only", action="store_true", help="answer only each conversation's last question")
    parser.add_argument(
        "--drop-near-duplicates", type=share, metavar="J",
        help=f"drop prompts that share J (0 to 1) of their shingles with one before ({NEAR}; with --data: off)",
    )  # fmt: skip

    by = parser.add_argument_group("who answers")
    by.add_argument("--target", help="folder or hub name of the target model")
    by.add_argument("--batch", type=at_least_one_or_auto, default=None, metavar="N", help="sequences at a time (auto)")
    by.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    by.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    by.add_argument(
        "--endpoint", metavar="URL",
        help="a server with the target instead, as vLLM and SGLang have it: http://127.0.0.1:8000/v1. Its key, if it "
        "wants one: DFLASH_ENDPOINT_KEY or OPENAI_API_KEY",
    )  # fmt: skip
    by.add_argument("--model", help="the server's model (the only one that it lists)")
    by.add_argument(
        "--concurrency", type=at_least_one, default=64, metavar="N", help="requests at a time (%(default)s)"
    )
    by.add_argument(
        "--request-timeout", type=seconds_above_zero, default=600.0, metavar="S", help="for an answer (%(default)g s)"
    )

    how = parser.add_argument_group("how")
    how.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy (%(default)g)")
    how.add_argument(
        "--top-p", type=share, default=1.0, help="of the likeliest tokens, those that reach it (%(default)g)"
    )
    how.add_argument("--top-k", type=at_least_one, help="the likeliest tokens (all)")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument(
        "--max-new-tokens", type=at_least_one, default=256, help="longer answers are dropped (%(default)s)"
    )
    how.add_argument(
        "--min-new-tokens", type=at_least_zero, default=8, help="shorter answers are dropped (%(default)s)"
    )
    how.add_argument(
        "--time-limit", type=seconds, metavar="S",
        help="begin no self-prompt after S/3 seconds and no answer after S; what was begun is waited for (of a server "
        "for --request-timeout at most). FILE then has the conversations so far, in the data's order but for the last "
        "few, and the same command, with more time or no limit, goes on to the same FILE as without the break",
    )  # fmt: skip

    rows = parser.add_argument_group("what becomes of the rows")
    rows.add_argument(
        "--heldout",
        nargs=2,
        metavar=("K", "FILE"),
        help="the first K rows go there instead, not a draw: of data that is sorted they are one-sided",
    )
    rows.add_argument("--excerpt", nargs=2, metavar=("K", "FILE"), help="K short rows of --out are copied there")
    rows.add_argument("--excerpt-bytes", type=at_least_one, default=1500, help="the longest of them (%(default)s)")
    options = parser.parse_args(words)
    for name in ("heldout", "excerpt"):
        if given := getattr(options, name):
            try:
                setattr(options, name, (at_least_one(given[0]), Path(given[1])))
            except argparse.ArgumentTypeError as error:
                parser.error(f"argument --{name}: {error}")
    files = [options.out, *(path for _, path in filter(None, (options.heldout, options.excerpt)))]
    if len({file.resolve() for file in files}) < len(files):
        parser.error("--out, --heldout and --excerpt need a file each")
    if options.data is not None and options.data.resolve() in {file.resolve() for file in files}:
        parser.error("--data can't be written to")
    if (options.endpoint is None) == (options.target is None):
        parser.error("one of --target and --endpoint is needed, and not both")
    if options.endpoint is not None and options.data is None:
        parser.error("--self-prompts needs --target: a server takes no half conversation")
    if options.model is not None and options.endpoint is None:
        parser.error("--model is for --endpoint")
    if options.temperature == 0 and (options.top_p < 1 or options.top_k is not None):
        parser.error("--top-p and --top-k need a --temperature: without one the best token is taken")
    if options.drop_near_duplicates is None and options.self_prompts is not None:
        options.drop_near_duplicates = NEAR
    return options


def at_least_one_or_auto(word: str) -> int | None:
    return None if word == "auto" else at_least_one(word)
