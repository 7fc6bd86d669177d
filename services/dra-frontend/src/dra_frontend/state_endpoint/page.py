# SPDX-License-Identifier: Apache-2.0
"""A page without scripts that draws the node: one box per core in its NUMA node, coloured by who holds it."""

from collections import defaultdict
from html import escape

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.devices.inventory import Inventory
from dra_frontend.state_endpoint.views import cpus_view, memory_view

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}
h1{font-size:1.3rem}h2{font-size:1rem;margin:1.2rem 0 .4rem}
.core{display:inline-block;border:1px solid #bbb;border-radius:4px;margin:2px;padding:2px}
.cpu{display:inline-block;min-width:2.2em;text-align:center;border-radius:3px;margin:1px;padding:1px 3px}
.shared{background:#e8f0e4}.reserved{background:#ddd}.claimed{color:#fff}
.bar{background:#eee;border-radius:3px;width:24rem;height:1rem;overflow:hidden}
.bar div{background:#4a7fb5;height:100%}
table{border-collapse:collapse}td,th{padding:2px 10px 2px 0;text-align:left}.bad{color:#b00}
"""


def _colour(uid: str) -> str:
    return f"hsl({sum(uid.encode()) * 47 % 360},45%,42%)"


def _cpus(inventory: Inventory, ledger: Ledger) -> str:
    nodes: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cpu in cpus_view(inventory, ledger):
        if cpu["use"] == "offline":
            continue
        uid = str(cpu.get("claimUid", ""))
        style = f' style="background:{_colour(uid)}"' if uid else ""
        title = escape(str(cpu.get("claim", cpu["use"])) or uid, quote=True)
        box = f'<span class="cpu {cpu["use"]}"{style} title="{title}">{cpu["cpu"]}</span>'
        nodes[int(cpu["numaNode"])][int(cpu["core"])].append(box)
    parts = []
    for node, cores in sorted(nodes.items()):
        boxes = "".join(f'<span class="core">{"".join(cpus)}</span>' for _, cpus in sorted(cores.items()))
        parts.append(f"<h2>NUMA node {node}</h2><div>{boxes}</div>")
    return "".join(parts)


def _memory(inventory: Inventory, ledger: Ledger) -> str:
    rows = []
    for entry in memory_view(inventory, ledger):
        share = 100 * entry["claimedBytes"] / entry["capacityBytes"] if entry["capacityBytes"] else 0
        amount = f"{entry['claimedBytes'] >> 20} of {entry['capacityBytes'] >> 20} MiB"
        bar = f"<div class=bar><div style='width:{share:.1f}%'></div></div>"
        rows.append(f"<tr><td>{escape(entry['device'])}</td><td>{amount}</td><td>{bar}</td></tr>")
    return "<h2>Memory</h2><table>" + "".join(rows) + "</table>"


def _claims(ledger: Ledger) -> str:
    rows = []
    for record in ledger.records:
        owner = f"{record.owner.container} of pod {record.owner.pod_uid}" if record.owner else "-"
        name = escape(f"{record.claim.namespace}/{record.claim.name}")
        given = ",".join(str(c) for c in sorted(record.cpus_of())) or "; ".join(
            f"{m.device} {m.size >> 20} MiB" for m in record.memory
        )
        rows.append(f"<tr><td>{name}</td><td>{record.driver}</td><td>{escape(given)}</td><td>{escape(owner)}</td></tr>")
    head = "<tr><th>claim</th><th>driver</th><th>given</th><th>owner</th></tr>"
    return "<h2>Claims</h2><table>" + head + "".join(rows) + "</table>"


def node_page(node: str, inventory: Inventory, ledger: Ledger, backend: BackendView) -> str:
    """Returns the page as HTML."""
    problem = f"<p class=bad>{escape(backend.problem)}</p>" if backend.problem else "<p>Enforcement is live.</p>"
    body = _cpus(inventory, ledger) + _memory(inventory, ledger) + _claims(ledger)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(node)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(node)}</h1>{problem}{body}</html>"
    )
