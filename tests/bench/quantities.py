# SPDX-License-Identifier: Apache-2.0
"""All measured quantities, each with a title, a unit, a budget and one sentence about the measurement."""

from typing import Final, Literal

from tests.bench.figures import TIMES, Quantity

IDLE: Final = "While nothing happens"
PODS: Final = "When pods start and end"
RESTARTS: Final = "When the driver or the runtime restarts"
LARGE: Final = "On a larger machine"
SECTIONS: Final = (IDLE, PODS, RESTARTS, LARGE)
"""All sections, in the order in which the page shows them."""
PROCESSES: Final = {"frontend": "DRA driver", "backend": "NRI plugin"}
"""Display name of each process, by its name on the stage."""

_PREPARE_BUDGET, _HOOK_BUDGET, _START_BUDGET, _MEMORY_BUDGET = 5.0, 2.0, 1500.0, 110.0

IDLE_CPU: Final = Quantity(
    key="idle-cpu",
    section=IDLE,
    title="Idle CPU",
    unit="%",
    how="CPU time of all processes of the driver while no pod starts or ends, in percent of one CPU.",
)
WAKEUPS: Final = Quantity(
    key="wakeups",
    section=IDLE,
    title="Idle wake-ups",
    unit="/s",
    how="How many times per second a driver thread starts to run after waiting (voluntary context switches).",
)
OWN_WAKEUPS: Final = Quantity(
    key="own-wakeups",
    section=IDLE,
    title="Idle wake-ups without gRPC's threads",
    unit="/s",
    how="Wake-ups per second of all threads except those that the gRPC library starts and names for its own use.",
)
PREEMPTIONS: Final = Quantity(
    key="preemptions",
    section=IDLE,
    title="Idle preemptions",
    unit="/s",
    how="How many times per second the kernel interrupts a driver thread to run another thread (involuntary context"
    " switches).",
    plotted=False,
)
RSS: Final = Quantity(
    key="rss",
    section=IDLE,
    title="Resident memory (RSS)",
    unit="MB",
    how="Resident memory of all processes of the driver after pods have started and ended; a library that two processes"
    " use counts twice.",
    budget=_MEMORY_BUDGET,
)
PSS: Final = Quantity(
    key="pss",
    section=IDLE,
    title="Memory of the pod (PSS)",
    unit="MB",
    how="Memory of all processes with each page of a library that two of them use counted once, as on a node whose"
    " images share their layers; computed from /proc/PID/smaps.",
)
KERNEL_PSS: Final = Quantity(
    key="kernel-pss",
    section=IDLE,
    title="PSS as the kernel counts it here",
    unit="MB",
    how="Pss of /proc/PID/smaps_rollup. It is smaller than on a node, because other programs of this benchmark use the"
    " same libraries.",
    plotted=False,
)


def of_process(quantity: Quantity, process: str, *, plotted: bool = False) -> Quantity:
    """Returns the quantity for a single process, given the one for all processes."""
    return quantity.model_copy(
        update={
            "key": f"{quantity.key}-{process}",
            "title": f"{quantity.title}: {PROCESSES[process]}",
            "how": f"{quantity.title} of the {PROCESSES[process]} alone.",
            "plotted": plotted,
            "budget": None,
        }
    )


def prepare(driver: str) -> Quantity:
    """Returns the quantity for NodePrepareResources calls to one DRA driver."""
    return Quantity(
        key=f"prepare-{driver}",
        section=PODS,
        title=f"Prepare a claim, {driver}",
        unit="ms",
        how=f"The kubelet's NodePrepareResources call to {driver} for a new pod's claim, from request to response.",
        budget=_PREPARE_BUDGET,
    )


def unprepare(driver: str) -> Quantity:
    """Returns the quantity for NodeUnprepareResources calls to one DRA driver."""
    return Quantity(
        key=f"unprepare-{driver}",
        section=PODS,
        title=f"Unprepare a claim, {driver}",
        unit="ms",
        how=f"The kubelet's NodeUnprepareResources call to {driver} for the claim of a pod that has ended.",
        plotted=False,
        budget=_PREPARE_BUDGET,
    )


Hook = Literal["CreateContainer", "StartContainer"]
_HOOKS: Final = {"CreateContainer": "Create a container", "StartContainer": "Start a container"}


def hook(method: Hook, *, claimed: bool) -> Quantity:
    """Returns the quantity for one kind of call from the container runtime."""
    kind = "with a claim" if claimed else "without a claim"
    return Quantity(
        key=f"{method}-{'claim' if claimed else 'plain'}",
        section=PODS,
        title=f"{_HOOKS[method]} {kind}",
        unit="ms",
        how=f"The runtime's {method} call to the NRI plugin for a container {kind}; the pod waits for it.",
        budget=_HOOK_BUDGET,
    )


HURRIED_CREATE: Final = Quantity(
    key="create-at-once",
    section=PODS,
    title="Create a container right after Prepare",
    unit="ms",
    how="CreateContainer for a container with a claim, called as soon as the claim is prepared: it may have to wait"
    " until other containers have left the claimed CPUs.",
)
OTHERS_OFF: Final = Quantity(
    key="others-off",
    section=PODS,
    title="Until other containers have left the CPUs",
    unit="ms",
    how="From the end of Prepare until containers without a claim can no longer run on the claimed CPUs. A kernel with"
    " cpuset partitions does this itself.",
)


def cpu_of_pod(*, claimed: bool) -> Quantity:
    """Returns the quantity for the CPU time that one pod costs the driver."""
    kind = "with a claim" if claimed else "without a claim"
    return Quantity(
        key=f"cpu-{'claim' if claimed else 'plain'}",
        section=PODS,
        title=f"CPU time of a pod {kind}",
        unit="ms",
        how=f"CPU time of all processes of the driver while pods {kind} start and end one after the other, divided by"
        " their number.",
    )


EXEC: Final = Quantity(
    key="exec-to-registered",
    section=RESTARTS,
    title="From start to registration",
    unit="ms",
    how="From the start of the driver's processes until the kubelet can call it, with the claims and containers on the"
    " node.",
    budget=_START_BUDGET,
)
SYNCHRONIZE: Final = Quantity(
    key="synchronize",
    section=RESTARTS,
    title="Synchronize with the runtime",
    unit="ms",
    how="The runtime restarts and calls Synchronize with every container of the node, from request to response.",
)
FORGOTTEN: Final = Quantity(
    key="forgotten",
    section=RESTARTS,
    title="Claims forgotten in a restart",
    unit="",
    how="For one claim that was prepared before the driver restarts and whose container is created afterwards: 1 if the"
    " driver rejects the container, else 0.",
    plotted=False,
)


def simulated(kind: str, cpus: int, budget: float) -> Quantity:
    """Returns the quantity for allocating a claim in memory."""
    return Quantity(
        key=f"simulated-{kind}",
        section=LARGE,
        title=f"Choose the CPUs for a claim, devices by {kind}",
        unit="ms",
        how=f"CPU time that this driver takes to allocate a claim in memory, on a synthetic machine with {cpus} CPUs;"
        " file access and calls are not included.",
        budget=budget,
        budgeted="p99",
    )


def growth(cpus: int, smallest: int) -> Quantity:
    """Returns the quantity for how much longer an allocation takes on a larger machine."""
    return Quantity(
        key=f"growth-{cpus}",
        section=LARGE,
        title=f"Time to choose CPUs, {cpus} over {smallest} CPUs",
        unit=TIMES,
        how=f"The median on {cpus} CPUs divided by the median on {smallest} CPUs; linear growth is {cpus // smallest}.",
        plotted=False,
        budget=cpus / smallest,
    )
