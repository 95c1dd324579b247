"""The child process of `test_npu_operators.py`: calls operators of the stand-in, and prints what it found as JSON."""

import json
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch_npu._registry import CALLS

HEADS, LATENT, ROPE, COUNT, SIZE, SCALE = 2, 16, 8, 5, 4, 0.3


def main() -> None:
    torch.manual_seed(0)
    print("FOUND " + json.dumps({"later": later(), "quantised": quantised()} | attention() | norm()))


def later() -> list[int]:
    """Calls of an operator that had run when it was submitted to a stream that is held, and after that."""
    x, gamma = torch.randn(4, 8).npu(), torch.ones(8).npu()
    torch.npu.synchronize()
    torch.ops.kvpp_device.hold()
    torch_npu.npu_rms_norm(x, gamma)
    before = CALLS["npu_rms_norm"]
    torch.ops.kvpp_device.let_go()
    torch.npu.synchronize()
    return [before, CALLS["npu_rms_norm"]]


def norm() -> dict[str, float]:
    x = torch.randn(4, 8)
    found, _ = torch_npu.npu_rms_norm(x.npu(), torch.ones(8).npu())
    return {"norm": difference(found, x / x.pow(2).mean(-1, keepdim=True).sqrt())}


def quantised() -> float:
    """The largest error, in steps."""
    x = torch.randn(4, 8)
    values, scales = (each.cpu() for each in torch_npu.npu_dynamic_quant(x.npu()))
    return ((values.float() * scales[:, None] - x).abs() / scales[:, None]).max().item()


def attention() -> dict[str, float]:
    """One query over five keys: in a row, in pages, chosen by an index, and in two parts, each against plain torch."""
    keys, tails = torch.randn(COUNT, 1, LATENT), torch.randn(COUNT, 1, ROPE)
    query, query_rope = torch.randn(1, HEADS, LATENT), torch.randn(1, HEADS, ROPE)
    whole = torch.einsum(
        "qhd,kd->qhk", torch.cat((query, query_rope), -1), torch.cat((keys, tails), -1)[:, 0]
    )
    expected = torch.einsum("qhk,kd->qhd", (whole * SCALE).softmax(-1), keys[:, 0])
    pages, tail_pages = torch.zeros(3, SIZE, 1, LATENT).npu(), torch.zeros(3, SIZE, 1, ROPE).npu()
    slots, table = torch.tensor([4, 5, 6, 7, 0]).npu(), torch.tensor([[1, 0]]).npu()
    torch.ops.npu._write_pages(pages, slots, keys.npu())
    torch.ops.npu._write_pages(tail_pages, slots, tails.npu())

    def row(first: int, end: int) -> Any:
        spread = keys[first:end].expand(-1, HEADS, -1).contiguous().npu()
        return torch_npu.npu_fused_infer_attention_score(
            query.npu(),
            spread,
            spread,
            query_rope=query_rope.npu(),
            key_rope=tails[first:end].expand(-1, HEADS, -1).contiguous().npu(),
            num_heads=HEADS,
            num_key_value_heads=HEADS,
            scale=SCALE,
            input_layout="TND",
            actual_seq_lengths=[1],
            actual_seq_lengths_kv=[end - first],
        )

    latent = pages.view(-1, 1, SIZE, LATENT)
    paged, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(),
        latent,
        latent,
        query_rope=query_rope.npu(),
        key_rope=tail_pages.view(-1, 1, SIZE, ROPE),
        num_query_heads=HEADS,
        num_key_value_heads=1,
        softmax_scale=SCALE,
        input_layout="TND_NTD",
        sparse_mode=3,
        block_table=table,
        block_size=SIZE,
        actual_seq_qlen=[1],
        actual_seq_kvlen=[COUNT],
    )
    chosen, *_ = torch.ops._C_ascend.npu_sparse_flash_attention(
        query.npu(),
        pages,
        pages,
        torch.arange(COUNT, dtype=torch.int32).view(1, 1, COUNT).npu(),
        SCALE,
        block_table=table,
        query_rope=query_rope.npu(),
        key_rope=tail_pages,
        actual_seq_lengths_query=torch.tensor([1]).npu(),
        actual_seq_lengths_kv=torch.tensor([COUNT]).npu(),
        layout_query="TND",
        layout_kv="PA_BSND",
    )
    parts = [row(0, 2), row(2, COUNT)]
    merged, _ = torch_npu.npu_attention_update(
        [sums.reshape(HEADS) for _, sums in parts], [out.reshape(HEADS, -1) for out, _ in parts], 0
    )
    return {
        "row": difference(row(0, COUNT)[0], expected),
        "paged": difference(paged.transpose(0, 1), expected),
        "chosen": difference(chosen, expected),
        "merged": difference(merged, expected[0]),
    }


def difference(found: Tensor, expected: Tensor) -> float:
    return (found.cpu() - expected).abs().max().item()


if __name__ == "__main__":
    main()
