"""Run by tests/test_deploy_image.py in namespaces of its own: makes this machine look like the
image, gives up root, and becomes the command.

    unshare --mount --net python tests/inside.py VENV COMMAND...

The root file system is read-only; /tmp and /var/lib/kvindexd are not. VENV is /opt/kvindexd. The
one capability that stays lets the process read this checkout, wherever it lies.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

UID = "65532"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def main() -> None:
    """Never returns."""
    venv, *command = sys.argv[1:]
    mount("--make-rprivate", "/")
    for folder in ("/opt", "/var/lib"):
        mount("-t", "tmpfs", "tmpfs", folder)
    os.symlink(venv, "/opt/kvindexd")
    os.mkdir("/var/lib/kvindexd", 0o700)
    os.chown("/var/lib/kvindexd", int(UID), int(UID))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    mount("-o", "remount,ro,bind", "/")
    mount("-o", "remount,ro", "/opt")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    capability = "-all,+dac_read_search"
    dropped = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups", "--no-new-privs"]
    dropped += ["--bounding-set", capability, "--inh-caps", capability]
    dropped += ["--ambient-caps", capability]
    os.execvp(dropped[0], [*dropped, *command])


def mount(*arguments: str) -> None:
    """mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
