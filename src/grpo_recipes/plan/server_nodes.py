"""Start the replicas of the vLLM server on several nodes.

vLLM's API server and the first replicas run on the first node. On each further node, the same command with
``--headless`` runs the next replicas, which join the API server at a port of the first node. All requests go through
the API server, also calls of worker methods, so the weight sync methods need not know the nodes.

    head, *headless = split_server(server, plan)
"""

from dataclasses import replace
from pathlib import Path

from grpo_recipes.plan.types import Plan, Process


def split_server(server: Process, plan: Plan) -> list[Process]:
    """Return the server's process on each of its nodes, given the process that would run all replicas on one node."""
    if plan.server_nodes == 1:
        return [server]
    local, gpus = plan.replicas // plan.server_nodes, len(plan.server_gpus) // plan.server_nodes
    meeting = {
        "--data-parallel-size-local": local,
        "--data-parallel-address": plan.nodes[0],
        "--data-parallel-rpc-port": plan.ports.replicas,
    }
    words = [word for flag, value in meeting.items() for word in (flag, str(value))]
    count = server.argv.index("--api-server-count")
    headless = [*server.argv[:count], *server.argv[count + 2 :], *words, "--headless", "--data-parallel-start-rank"]
    processes = []
    for node in range(plan.server_nodes):
        log, node_gpus = Path(server.log), plan.server_gpus[node * gpus : (node + 1) * gpus]
        processes.append(
            replace(
                server,
                argv=[*headless, str(node * local)] if node else [*server.argv, *words],
                environment={**server.environment, "CUDA_VISIBLE_DEVICES": ",".join(node_gpus)},
                gpus=node_gpus,
                log=str(log.with_stem(f"{log.stem}_node{node}")) if node else server.log,
                node=node,
            )
        )
    return processes
