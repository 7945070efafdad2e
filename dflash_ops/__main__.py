"""`python -m dflash_ops`, and the console script: nothing but the way to cli.py, whose imports take longest of all.

Ctrl-C meanwhile ends it with 130 and no word. Not by KeyboardInterrupt, which an import may swallow or print.
"""

import os
import signal

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started us has it ignored
    try:
        if usual:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
        from dflash_ops.cli import main as run

        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before cli.py looks out for it, or after
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
