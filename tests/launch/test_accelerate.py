"""The trainers' rendezvous listens at their own address, as the launcher's `accelerate launch` starts it."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import psutil

from grpo_recipes.launch import accelerate


def test_the_rendezvous_listens_at_its_own_address_alone(monkeypatch) -> None:
    from accelerate.commands import launch
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as torchs

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plain, values, stores = torchs.TCPStore, [], []

    def fake_launch() -> None:
        def store(is_master: bool) -> Any:
            return torchs.TCPStore("127.0.0.1", port, 1, is_master, datetime.timedelta(seconds=20), multi_tenant=True)

        stores.extend([store(True), store(False)])
        stores[0].set("key", "value")
        values.append(stores[1].get("key"))

    monkeypatch.setattr(launch, "main", fake_launch)
    accelerate.main()
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert values == [b"value"] and torchs.TCPStore is plain
