"""Entry point of the sandbox's own process: `python -m dflash_ops.sandbox guard NAME`, started by `up`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] != ["guard"]:
        sys.exit("this is started by `dflash-ops sandbox up`")
    from dflash_ops.sandbox import guard

    guard.main()
