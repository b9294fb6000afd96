"""``isthmus tune``: measures the matmuls of a run and writes the choices that its next start uses."""
