"""The whole job in one command: what `make demo` and `dflash-ops sandbox demo` run."""
