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
RACK_LATENCY_S = 4e-6
"""Added by the steps between racks, which pass two more switches and longer cables: an assumption."""


@dataclass(frozen=True, slots=True)
class Cluster:
    part: Part
    devices_per_node: int = 8
    nodes: int = 1
    rack_nodes: int | None = None
    """Nodes that the switches of a rack, or of a pod, join at the full bandwidth of their network cards; None: all."""
    oversubscription: float = 1.0
    """Bandwidth of the network cards of a rack over that of its links to the other racks."""

    @property
    def world_size(self) -> int:
        return self.devices_per_node * self.nodes

    @property
    def linked(self) -> int:
        """Neighbouring ranks that the part's links join: those of a node, or of a rack of GB200."""
        return max(self.devices_per_node, self.part.linked_devices if self.part.rack else 0)

    @property
    def rack_devices(self) -> int:
        """Neighbouring ranks that one level of the network joins."""
        return max(self.linked, self.devices_per_node * (self.nodes if self.rack_nodes is None else self.rack_nodes))


@dataclass(slots=True)
class Sent:
    """Bytes that a rank sends."""

    total: float = 0.0
    to_nodes: float = 0.0
    """The part that leaves the node; of a rack of GB200, the rack."""
    to_racks: float = 0.0
    """The part that leaves the rack."""

    def add(self, other: Sent, times: float = 1.0) -> None:
        self.total += times * other.total
        self.to_nodes += times * other.to_nodes
        self.to_racks += times * other.to_racks


class Ring:
    """Ranks of one collective; ``stride`` is the distance of neighbours, in ranks.

    Ranks are numbered tp, cp, ep, dp, pp, the first fastest, as in Megatron-Core. All groups of a kind communicate at
    the same time, so each has its share of the links, of the network cards and of the links between racks.
    """

    def __init__(self, cluster: Cluster, size: int, stride: int = 1) -> None:
        part = cluster.part
        self.size = size
        self.in_node: int = max(1, min(size, cluster.linked // stride))
        self.nodes: int = -(-size // self.in_node)
        self.in_rack: int = max(self.in_node, min(size, cluster.rack_devices // stride))
        self.racks: int = -(-size // self.in_rack)
        self.latency_s: float = (size - 1) * LINK_LATENCY_S + (self.nodes - 1) * NETWORK_LATENCY_S
        self.latency_s += (self.racks - 1) * RACK_LATENCY_S
        self.links_bytes_per_s: float = LINK_SHARE * part.link_between(self.in_node) * 1e9
        """From a device to all others of its node."""
        self.network_bytes_per_s: float = NETWORK_SHARE * part.network_gb_s * 1e9
        """Bandwidth of a device."""
        self.racks_bytes_per_s: float = self.network_bytes_per_s / cluster.oversubscription
        """Share of a device in the links between racks."""
        self.bytes_per_s: float = self.links_bytes_per_s
        """Bandwidth of a device in a ring through all ranks: the slowest connection counts. A ring uses as many network
        cards of a node, and as large a share of the links between racks, as it has ranks there.
        """
        if self.nodes > 1:
            network = self.network_bytes_per_s * self.in_node
            self.bytes_per_s = min(self.links_bytes_per_s, network) if self.in_node > 1 else network
        if self.racks > 1:
            self.bytes_per_s = min(self.bytes_per_s, self.racks_bytes_per_s * self.in_rack)
        linked, in_rack = stride < cluster.linked, stride < cluster.rack_devices
        if linked:
            self.neighbour_bytes_per_s: float = LINK_SHARE * part.link_between(2) * 1e9
        else:
            self.neighbour_bytes_per_s = self.network_bytes_per_s if in_rack else self.racks_bytes_per_s
        self.neighbour_latency_s: float = (
            LINK_LATENCY_S if linked else NETWORK_LATENCY_S + RACK_LATENCY_S * (not in_rack)
        )

    def gather(self, total_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``total_bytes``: each device sends (n - 1) / n of them
        (Thakur et al. 2005, section 4).
        """
        if self.size == 1 or total_bytes <= 0:
            return 0.0
        return total_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.latency_s

    def gather_sends(self, total_bytes: float) -> Sent:
        """Bytes that a device sends in :meth:`gather`, in the mean of the devices: the last one of a node sends to
        another node.
        """
        sent = total_bytes * (self.size - 1) / self.size
        to_nodes = sent * self.nodes / self.size if self.nodes > 1 else 0.0
        return Sent(sent, to_nodes, sent * self.racks / self.size if self.racks > 1 else 0.0)

    def all_to_all(self, sent_bytes: float) -> float:
        """Each device sends ``sent_bytes`` / n to every rank: to those of its node over links, to others over its
        own network card, and to other racks over its share of their links, at the same time.
        """
        if self.size == 1 or sent_bytes <= 0:
            return 0.0
        sent = self.all_to_all_sends(sent_bytes)
        inside = (sent.total - sent.to_nodes) / self.links_bytes_per_s
        slowest = max(inside, sent.to_nodes / self.network_bytes_per_s, sent.to_racks / self.racks_bytes_per_s)
        return slowest + self.latency_s

    def all_to_all_sends(self, sent_bytes: float) -> Sent:
        """Bytes that a device sends in :meth:`all_to_all`."""
        share = sent_bytes / self.size
        return Sent(share * (self.size - 1), share * (self.size - self.in_node), share * (self.size - self.in_rack))

    def send(self, number_bytes: float) -> float:
        """To the neighbour in the group."""
        return 0.0 if self.size == 1 else number_bytes / self.neighbour_bytes_per_s + self.neighbour_latency_s

    def neighbour_sends(self, number_bytes: float) -> Sent:
        """Bytes that a device sends in :meth:`send`, in the mean of the devices."""
        if self.size == 1:
            return Sent()
        return Sent(
            number_bytes,
            number_bytes * (self.nodes - 1) / (self.size - 1),
            number_bytes * (self.racks - 1) / (self.size - 1),
        )
