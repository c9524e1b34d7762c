"""Run `accelerate launch` with a rendezvous that listens only at the trainers' own address.

The store of torch's static rendezvous has no authentication and listens on every interface. Here it listens on the
loopback address, or for several nodes on the address of the trainers' first node. torch offers no way to choose the
address: the store's class is fixed in ``static_tcp_rendezvous``, and the registry of rendezvous handlers rejects a
second handler for ``static``.

For one training process without torch's agent, accelerate only sets variables and starts Python again. That would
import torch twice, so the script runs in this process.

``main`` replaces torch's class and accelerate's function while it runs.
"""

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from grpo_recipes.attributes import replace_attributes

_READ_ON_IMPORT = ("OMP_", "KMP_", "CUDA_")  # variables that torch's libraries read when they are loaded


def main() -> None:
    """Run `accelerate launch` with the arguments of the command line, with two changes.

    The store of the rendezvous listens only at the master address, and a single process runs the script here.
    """
    from accelerate.commands import launch
    from accelerate.utils import prepare_simple_launcher_cmd_env
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    start_python = launch.simple_launcher

    def bound_store(host: str, port: int, world_size: int, is_master: bool, *args: Any, **options: Any) -> TCPStore:
        """Return a TCPStore; on the master it listens only at ``host``, unlike torch's own, which has all addresses."""
        if is_master:
            options["master_listen_fd"] = socket.create_server((host, port)).detach()
        return TCPStore(host, port, world_size, is_master, *args, **options)

    def run_script(args: argparse.Namespace) -> None:
        """Set accelerate's variables, and run the script in this process.

        If torch's libraries have already read one of the changed variables, start the script in another process.
        """
        _, environment = prepare_simple_launcher_cmd_env(args)
        changed = [name for name, value in environment.items() if os.environ.get(name) != value]
        if any(name.startswith(_READ_ON_IMPORT) for name in changed):
            start_python(args)
            return
        os.environ.update(environment)
        sys.argv = [args.training_script, *args.training_script_args]
        sys.path.insert(0, str(Path(args.training_script).resolve().parent))  # like `python SCRIPT`
        runpy.run_path(args.training_script, run_name="__main__")

    store, launcher = {"TCPStore": bound_store}, {"simple_launcher": run_script}
    with replace_attributes(static_tcp_rendezvous, **store), replace_attributes(launch, **launcher):
        launch.main()


if __name__ == "__main__":
    main()
