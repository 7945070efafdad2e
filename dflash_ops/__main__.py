"""`python -m dflash_ops`: the same as the console script."""

from dflash_ops.cli import main

main()
