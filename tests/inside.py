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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UID = "65532"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def main() -> None:
    """Never returns."""
    venv, *command = sys.argv[1:]
    mount("--make-rprivate", "/")
    kept = keep(ROOT, venv)
    for folder in ("/opt", "/var/lib"):
        mount("-t", "tmpfs", "tmpfs", folder)
    os.symlink(venv, "/opt/kvindexd")
    os.mkdir("/var/lib/kvindexd", 0o700)
    os.chown("/var/lib/kvindexd", int(UID), int(UID))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    for folder, place in kept.items():  # this checkout may lie in what is hidden now
        if not os.path.exists(folder):
            os.makedirs(folder)
            mount("--bind", place, folder)
    mount("-o", "remount,ro,bind", "/")
    mount("-o", "remount,ro", "/opt")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    capability = "-all,+dac_read_search"
    dropped = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups", "--no-new-privs"]
    dropped += ["--bounding-set", capability, "--inh-caps", capability]
    dropped += ["--ambient-caps", capability]
    os.execvp(dropped[0], [*dropped, *command])


def keep(*folders: str) -> dict[str, str]:
    """Another way to each folder, for when its own is hidden: folder -> place under /mnt."""
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    places = {folder: f"/mnt/{n}" for n, folder in enumerate(folders)}
    for folder, place in places.items():
        os.mkdir(place)
        mount("--bind", folder, place)
    return places


def mount(*arguments: str) -> None:
    """mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
