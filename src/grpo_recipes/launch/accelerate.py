"""Run `accelerate launch` with a rendezvous that listens only at the trainers' own address.

The store of torch's static rendezvous has no authentication and listens on every interface. Here it listens on the
loopback address, or for several nodes on the address of the trainers' first node.

torch offers no way to choose the address: the store's class is fixed in ``static_tcp_rendezvous``, and the registry of
rendezvous handlers rejects a second handler for ``static``. Therefore ``main`` replaces the class while it runs. It is
the only code in this process.
"""

import socket
from typing import Any

from grpo_recipes.attributes import replace_attributes


def main() -> None:
    """Run `accelerate launch` with the arguments of the command line."""
    from accelerate.commands.launch import main as launch
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    def bound_store(host: str, port: int, world_size: int, is_master: bool, *args: Any, **options: Any) -> TCPStore:
        if is_master:
            options["master_listen_fd"] = socket.create_server((host, port)).detach()
        return TCPStore(host, port, world_size, is_master, *args, **options)

    with replace_attributes(static_tcp_rendezvous, TCPStore=bound_store):
        launch()


if __name__ == "__main__":
    main()
