"""dflash-ops: deploy, run and watch a DFlash drafter trainer in a container on a Proxmox VE GPU box."""

import sys

if sys.platform == "win32":  # no terminals, locks and signals as we need them; said before something else fails
    sys.exit("dflash-ops needs Linux or macOS; on Windows it works in WSL")
