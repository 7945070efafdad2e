"""nvidia-smi on a machine without GPUs: asks the hypervisor's daemon, which answers as the caller may see it."""

import json
import socket
import sys


def main():
    with socket.socket(socket.AF_UNIX) as connection:
        for path in ("/dev/nvidia-sandbox", "/run/sandbox-gpu.sock"):
            try:
                connection.connect(path)
                break
            except OSError:
                continue
        else:
            print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
            return 9
        connection.sendall(json.dumps({"nvidia-smi": sys.argv[1:]}).encode() + b"\n")
        answer = json.loads(connection.makefile("rb").readline())
    sys.stdout.write(answer["out"])
    return answer["code"]


sys.exit(main())
