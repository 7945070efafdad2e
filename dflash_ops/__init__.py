"""dflash-ops: deploy, run and watch a DFlash drafter trainer in a container on a Proxmox VE GPU box."""
