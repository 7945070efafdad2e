"""What forked.py's processes have loaded when they begin: all that a command of dflash-ops may."""

import gc
import pkgutil
from importlib import import_module

import proxmoxer

import dflash_ops
from dflash_ops import cli

cli.build()
for found in pkgutil.iter_modules(dflash_ops.__path__, "dflash_ops."):
    if not found.ispkg:
        import_module(found.name)
del proxmoxer
gc.freeze()
