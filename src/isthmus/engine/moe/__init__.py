"""Mixture-of-experts layers: router, token dispatch, grouped GEMM, load balancing."""
