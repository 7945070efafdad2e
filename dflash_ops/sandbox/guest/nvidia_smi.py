"""nvidia-smi on a machine without GPUs: asks the hypervisor's daemon, which answers as the caller may see it.

It starts often, and a real one is quick: it loads nothing that Python does not load by itself.
"""

import _socket
import sys


def main():
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    for path in ("/dev/nvidia-sandbox", "/run/sandbox-gpu.sock"):
        try:
            connection.connect(path)
            break
        except OSError:
            continue
    else:
        print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        return 9
    words = "\0".join(["nvidia-smi", *sys.argv[1:]]).replace("\n", " ")
    connection.sendall(words.encode("utf-8", "surrogateescape") + b"\n")
    said = b""
    while part := connection.recv(65536):
        said += part
    code, _, out = said.decode().partition("\n")
    sys.stdout.write(out)
    return int(code)


sys.exit(main())
