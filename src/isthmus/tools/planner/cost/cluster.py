"""GPUs, their nodes, and the time of collectives between them."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.platforms.parts import Part

LINK_SHARE = 0.75
"""Share of the data sheet's link bandwidth that large rings reach within a node: MI300X 70%, A100 78%, H200 82%."""
NETWORK_SHARE = 0.9
"""The same between nodes: 4 nodes of H200 91%, of B200 94%."""
LINK_LATENCY_S = 5.5e-6
"""Latency of a step of a ring, which gives the times of small messages on 8 B200."""
NETWORK_LATENCY_S = 11e-6
"""Added by the steps between nodes, from 4 nodes of B200. Both and the shares: collectives in "Machine Learning
Engineering" (S. Bekman, 2026), chapter on networks.
"""


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
        """Neighbouring ranks that the part's links join: those of a node, or of a rack of GB200."""
        return max(self.devices_per_node, self.part.linked_devices if self.part.rack else 0)


class Ring:
    """Ranks of one collective; ``stride`` is the distance of neighbours, in ranks.

    Ranks are numbered tp, cp, ep, dp, pp, the first fastest, as in Megatron-Core. All groups of a kind communicate at
    the same time, so each has its share of the links and network cards.
    """

    def __init__(self, cluster: Cluster, size: int, stride: int = 1) -> None:
        part = cluster.part
        self.size = size
        self.in_node = max(1, min(size, cluster.linked // stride))
        self.nodes = -(-size // self.in_node)
        self.latency_s = (size - 1) * LINK_LATENCY_S + (self.nodes - 1) * NETWORK_LATENCY_S
        self.links_bytes_per_s = LINK_SHARE * part.link_between(self.in_node) * 1e9
        """From a device to all others of its node."""
        self.network_bytes_per_s = NETWORK_SHARE * part.network_gb_s * 1e9
        """Bandwidth of a device."""
        self.bytes_per_s = self.links_bytes_per_s
        """Bandwidth of a device in a ring through all ranks: the slowest connection counts. A ring uses as many network
        cards of a node as it has ranks there.
        """
        if self.nodes > 1:
            network = self.network_bytes_per_s * self.in_node
            self.bytes_per_s = min(self.links_bytes_per_s, network) if self.in_node > 1 else network
        linked = stride < cluster.linked
        self.neighbour_bytes_per_s = LINK_SHARE * part.link_between(2) * 1e9 if linked else self.network_bytes_per_s
        self.neighbour_latency_s = LINK_LATENCY_S if linked else NETWORK_LATENCY_S

    def gather(self, total_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``total_bytes``: each device sends (n - 1) / n of them
        (Thakur et al. 2005, section 4).
        """
        if self.size == 1 or total_bytes <= 0:
            return 0.0
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.latency_s

    def all_to_all(self, sent_bytes: float) -> float:
        """Each device sends ``sent_bytes`` / n to every rank, to those of its node over links and to others over its
        own network card, at the same time.
        """
        if self.size == 1 or sent_bytes <= 0:
            return 0.0
        inside = sent_bytes * (self.in_node - 1) / self.size / self.links_bytes_per_s
        outside = sent_bytes * (self.size - self.in_node) / self.size / self.network_bytes_per_s
        return max(inside, outside) + self.latency_s

    def send(self, number_bytes: float) -> float:
        """To the neighbour in the group."""
        return 0.0 if self.size == 1 else number_bytes / self.neighbour_bytes_per_s + self.neighbour_latency_s
