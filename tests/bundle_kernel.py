"""A kernel that has the libraries but neither this repository nor a network, as a bundle's reader has it.

    python -I -S bundle_kernel.py REPOSITORY LIBRARIES KERNEL_ARGUMENTS...

LIBRARIES: the folder of installed packages. Run with -I -S, which leaves out PYTHONPATH
and the .pth file by which an editable install puts this repository on the path.
"""

import os
import sys
import types

repository, libraries = sys.argv[1:3]
del sys.argv[1:3]
sys.path.append(libraries)


def watch(event, arguments):
    """Refuse to open a file of the repository and to connect to anything but this machine."""
    if event == "open" and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        if path.startswith(repository + os.sep) and not path.startswith(tuple(folder + os.sep for folder in allowed)):
            raise PermissionError(f"a bundle opens {path}, a file of the repository")
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in ("127.0.0.1", "::1"):
        raise ConnectionRefusedError(f"a bundle connects to {arguments[1]}")


allowed = [os.path.join(repository, ".venv"), libraries, sys.prefix]

google, colab = types.ModuleType("google"), types.ModuleType("google.colab")   # there to be imported, and empty
google.__path__, google.colab = [], colab
sys.modules.update({"google": google, "google.colab": colab})

from ipykernel.kernelapp import launch_new_instance  # noqa: E402

sys.addaudithook(watch)
launch_new_instance()
