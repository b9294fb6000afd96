"""Launching ranks: rendezvous, heartbeat, first failure."""
