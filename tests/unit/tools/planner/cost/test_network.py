"""Links of a node, of a rack and between racks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.platforms.parts import part_named
from isthmus.tools.planner.cost.cluster import Cluster, Ring

FLAT = Cluster(part_named("H100"), nodes=64)
RACKS = replace(FLAT, rack_nodes=16, oversubscription=8.0)
GIB = 1 << 30


def test_groups_within_a_rack_do_not_see_the_racks() -> None:
    for size, stride in ((8, 1), (16, 8), (128, 1)):
        flat, racks = Ring(FLAT, size, stride), Ring(RACKS, size, stride)
        assert racks.racks == 1
        assert (racks.gather(GIB), racks.all_to_all(GIB)) == (flat.gather(GIB), flat.all_to_all(GIB))
        assert racks.gather_sends(GIB).to_racks == racks.all_to_all_sends(GIB).to_racks == 0


def test_a_ring_is_slowed_if_it_has_fewer_ranks_in_a_rack_than_the_oversubscription() -> None:
    wide, narrow = Ring(RACKS, 512), Ring(RACKS, 4, 128)
    assert (wide.racks, narrow.racks, narrow.in_rack) == (4, 4, 1)
    assert wide.gather(GIB) == pytest.approx(Ring(FLAT, 512).gather(GIB), rel=0.01)
    assert narrow.gather(GIB) == pytest.approx(8 * Ring(FLAT, 4, 128).gather(GIB), rel=0.01)


def test_an_all_to_all_is_slowed_by_what_leaves_the_rack() -> None:
    ring = Ring(RACKS, 512)
    sent = ring.all_to_all_sends(GIB)
    assert (sent.to_nodes / GIB, sent.to_racks / GIB) == pytest.approx((504 / 512, 384 / 512))
    between = sent.to_racks / (Ring(FLAT, 512).network_bytes_per_s / 8)
    assert ring.all_to_all(GIB) == pytest.approx(between, rel=0.05)


def test_stages_of_a_pipeline_send_to_the_next_rack_at_its_share() -> None:
    stages = Ring(RACKS, 4, 128)
    assert stages.send(GIB) == pytest.approx(8 * Ring(FLAT, 4, 128).send(GIB), rel=0.01)
    inside = Ring(RACKS, 16, 32)
    assert inside.send(GIB) == Ring(FLAT, 16, 32).send(GIB)
    assert inside.neighbour_sends(15.0).to_racks == 3.0


def test_the_last_rank_of_a_node_sends_to_the_next_node() -> None:
    sent = Ring(FLAT, 16).gather_sends(16.0)
    assert (sent.total, sent.to_nodes) == (15.0, 15.0 * 2 / 16)
    assert Ring(FLAT, 8).gather_sends(16.0).to_nodes == 0
