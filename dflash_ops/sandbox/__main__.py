"""Entry point of the sandbox's own process: `python -m dflash_ops.sandbox guard NAME LOCK`, started by `up`.

NAME is for those who read a list of processes; LOCK is the number of the descriptor of `up`'s lock.
"""

import sys

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "guard" or not sys.argv[3].isdigit():
        sys.exit("this is started by `dflash-ops sandbox up`")
    from dflash_ops.sandbox import guard

    guard.main(int(sys.argv[3]))
