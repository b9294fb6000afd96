"""GPUs, their nodes, and the time of collectives between them."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.platforms.parts import Part

LINK_SHARE = 0.78
"""Share of the data sheet's link bandwidth that large collectives reach within a node."""
NETWORK_SHARE = 0.85
"""The same between nodes."""
LINK_LATENCY_S = 3e-6
"""Of a message between devices of a node, with the start of its kernel."""
NETWORK_LATENCY_S = 12e-6


@dataclass(frozen=True, slots=True)
class Cluster:
    part: Part
    devices_per_node: int = 8
    nodes: int = 1

    @property
    def world_size(self) -> int:
        return self.devices_per_node * self.nodes

    @property
    def linked(self) -> int:
        """Neighbouring ranks that the part's links join: those of a node, or more in a rack of GB200."""
        return max(self.devices_per_node, self.part.linked_devices)


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks of one collective; ``stride`` is the distance of neighbours, in ranks.

    Ranks are numbered tp, cp, ep, dp, pp, the first fastest, as in Megatron-Core. All groups of a kind communicate at
    the same time, so each has its share of the links and network cards.
    """

    cluster: Cluster
    size: int
    stride: int = 1

    @property
    def in_node(self) -> int:
        return max(1, min(self.size, self.cluster.linked // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)

    def bytes_per_s(self) -> float:
        """Bandwidth of a device in a ring through all ranks: the slowest connection counts.

        A ring within nodes uses all links, and as many network cards as it has ranks in a node.
        """
        part = self.cluster.part
        links = LINK_SHARE * part.link_between(self.in_node) if self.in_node > 1 else float("inf")
        if self.nodes == 1:
            return links * 1e9
        return min(links, NETWORK_SHARE * part.network_gb_s * self.in_node) * 1e9

    def latency_s(self) -> float:
        return (self.in_node - 1) * LINK_LATENCY_S + (self.nodes - 1) * NETWORK_LATENCY_S

    def gather(self, total_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``total_bytes``: each device sends (n - 1) / n of them
        (Thakur et al. 2005, section 4).
        """
        if self.size == 1 or total_bytes <= 0:
            return 0.0
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s() + self.latency_s()

    def all_reduce(self, total_bytes: float) -> float:
        """Reduce-scatter and all-gather."""
        return 2 * self.gather(total_bytes)

    def all_to_all(self, sent_bytes: float) -> float:
        """Each device sends ``sent_bytes`` / n to every rank, to those of its node over links and to others over its
        own network card, at the same time.
        """
        if self.size == 1 or sent_bytes <= 0:
            return 0.0
        part, n = self.cluster.part, self.size
        inside = sent_bytes * (self.in_node - 1) / n
        outside = sent_bytes * (n - self.in_node) / n
        seconds = inside / (LINK_SHARE * part.link_between(self.in_node) * 1e9) if inside else 0.0
        return max(seconds, outside / (NETWORK_SHARE * part.network_gb_s * 1e9)) + self.latency_s()

    def send(self, number_bytes: float) -> float:
        """To the neighbour in the group."""
        if self.size == 1:
            return 0.0
        part = self.cluster.part
        if self.stride < self.cluster.linked:
            return number_bytes / (LINK_SHARE * part.link_between(2) * 1e9) + LINK_LATENCY_S
        return number_bytes / (NETWORK_SHARE * part.network_gb_s * 1e9) + NETWORK_LATENCY_S
