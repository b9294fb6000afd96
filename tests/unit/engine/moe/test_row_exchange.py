"""Rows that are exchanged with their weights have the bits of those that are not exchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.engine.moe import row_exchange
from isthmus.engine.moe.routed_tokens import RoutedTokens
from isthmus.engine.moe.row_exchange import RowExchange

T, K, E = 20, 2, 5


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("dropped", [0, 3])
@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (8, torch.bfloat16), (7, torch.bfloat16)])
def test_exchanged_rows_keep_their_bits(
    width: int, dtype: torch.dtype, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_exchange, "all_gather", lambda x, group: x)  # Megatron-Core's needs a process group
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, width, generator=generator).to(dtype)
    weights = torch.rand(T, K, generator=generator)  # float32: bfloat16 has no such numbers
    chosen = torch.randint(E, (T, K), generator=generator)
    chosen.view(-1)[:dropped] = E
    scale = torch.randn(T * K - dropped, width, generator=generator).to(dtype)

    def experts(rows: Tensor, row_weights: Tensor) -> Tensor:
        assert rows.dtype == dtype and row_weights.dtype == torch.float32
        return (rows * scale * row_weights[:, None]).to(dtype)

    def results(*, exchanged: bool) -> list[Tensor]:
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        routed = RoutedTokens(chosen if exchanged else E - 1 - chosen.where(chosen < E, -1), E)
        if dropped:
            routed.keep(T * K - dropped)
        else:
            routed.keep_all()
        if exchanged:
            counts = routed.counts.view(1, 1, 1, E)
            exchange = RowExchange(routed, counts, counts.sum(-1).tolist(), OneRank(), OneRank())
            out = exchange.combine(experts(*exchange.dispatch(x, w)))
        else:
            out = routed.combine(experts(*routed.gather(x, w)))
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, w))]

    for a, b in zip(results(exchanged=True), results(exchanged=False), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
