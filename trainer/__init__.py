"""The bundled DFlash drafter trainer. It runs in the container and knows nothing of dflash_ops."""
