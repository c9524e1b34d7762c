"""`accelerate launch` whose rendezvous listens at the trainers' own address: torch's listens on every interface.

That store has no authentication. On one node its address is the loopback, on several that of the trainers' first node.
"""

import socket
from typing import Any

from grpo_recipes.attributes import replaced


def main() -> None:
    """Run `accelerate launch` with the arguments of the command line."""
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    store = static_tcp_rendezvous.TCPStore

    def bound_store(host: str, port: int, world: int, is_master: bool, *others: Any, **options: Any) -> Any:
        if is_master:
            options["master_listen_fd"] = socket.create_server((host, port)).detach()
        return store(host, port, world, is_master, *others, **options)

    with replaced(static_tcp_rendezvous, TCPStore=bound_store):
        launch()


if __name__ == "__main__":
    main()
