"""Starting ranks, rendezvous, heartbeat, first failure, and the environment of a rank."""
