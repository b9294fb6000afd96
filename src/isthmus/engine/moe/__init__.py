"""Mixture of experts: router, token dispatch, grouped GEMM, load balancing."""
