"""The stand-in operators: on the device's streams, and agreeing with one another where they compute the same."""

import json
import os
import subprocess
import sys

import pytest

from tests.npu.engine import RELEASED, REPOSITORY, engine_variables

pytestmark = [pytest.mark.npu, pytest.mark.timeout(300)]

RUN = """
import json, torch, torch_npu
torch.manual_seed(0)
found = {}

# Submitted and not run: the stream is held.
x, gamma = torch.randn(4, 8).npu(), torch.ones(8).npu()
torch.npu.synchronize()
torch.ops.kvpp_device.hold()
y, _ = torch_npu.npu_rms_norm(x, gamma)
before = torch_npu._registry.CALLS["npu_rms_norm"]
torch.ops.kvpp_device.let_go()
on_host = y.cpu()
found["later"] = [before, y.shape == x.shape, torch_npu._registry.CALLS["npu_rms_norm"] - before]
norm = x.cpu() / x.cpu().pow(2).mean(-1, keepdim=True).sqrt()
found["norm"] = (on_host - norm).abs().max().item()

# Attention over pages is attention over the same keys in a row.
heads, latent, rope, count, size = 2, 16, 8, 5, 4
keys, tails = torch.randn(count, 1, latent), torch.randn(count, 1, rope)
pages, tail_pages = torch.zeros(3, size, 1, latent).npu(), torch.zeros(3, size, 1, rope).npu()
slots = torch.tensor([4, 5, 6, 7, 0]).npu()  # the request's blocks are 1 and 0
torch.ops.npu._write_pages(pages, slots, keys.npu())
torch.ops.npu._write_pages(tail_pages, slots, tails.npu())
q, q_rope = torch.randn(1, heads, latent), torch.randn(1, heads, rope)
paged, _ = torch_npu.npu_fused_infer_attention_score_v2(
    q.npu(), pages.view(-1, 1, size, latent), pages.view(-1, 1, size, latent), query_rope=q_rope.npu(),
    key_rope=tail_pages.view(-1, 1, size, rope), num_query_heads=heads, num_key_value_heads=1, softmax_scale=0.3,
    input_layout="TND_NTD", sparse_mode=3, block_table=torch.tensor([[1, 0]]).npu(), block_size=size,
    actual_seq_qlen=[1], actual_seq_kvlen=[count])
flat, _ = torch_npu.npu_fused_infer_attention_score(
    q.npu(), keys.expand(-1, heads, -1).contiguous().npu(), keys.expand(-1, heads, -1).contiguous().npu(),
    query_rope=q_rope.npu(), key_rope=tails.expand(-1, heads, -1).contiguous().npu(), num_heads=heads,
    num_key_value_heads=heads, scale=0.3, input_layout="TND", sparse_mode=3, actual_seq_lengths=[1],
    actual_seq_lengths_kv=[count])
found["paged"] = (paged.cpu().transpose(0, 1) - flat.cpu()).abs().max().item()
scores = torch.einsum("qhd,kd->qhk", torch.cat((q, q_rope), -1), torch.cat((keys, tails), -1)[:, 0]) * 0.3
found["flat"] = (torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, 0]) - flat.cpu()).abs().max().item()

# Sparse attention that may choose every key is dense attention.
index = torch.arange(count, dtype=torch.int32).view(1, 1, count).npu()
sparse, *_ = torch.ops._C_ascend.npu_sparse_flash_attention(
    q.npu(), pages, pages, index, 0.3, block_table=torch.tensor([[1, 0]]).npu(), query_rope=q_rope.npu(),
    key_rope=tail_pages, actual_seq_lengths_query=torch.tensor([1]).npu(),
    actual_seq_lengths_kv=torch.tensor([count]).npu(), layout_query="TND", layout_kv="PA_BSND")
found["sparse"] = (sparse.cpu() - flat.cpu()).abs().max().item()

# Parts of the keys together give what all of them give.
def part(first, end):
    out, sums = torch_npu.npu_fused_infer_attention_score(
        q.npu(), keys[first:end].expand(-1, heads, -1).contiguous().npu(),
        keys[first:end].expand(-1, heads, -1).contiguous().npu(), query_rope=q_rope.npu(),
        key_rope=tails[first:end].expand(-1, heads, -1).contiguous().npu(), num_heads=heads,
        num_key_value_heads=heads, scale=0.3, input_layout="TND", actual_seq_lengths=[1],
        actual_seq_lengths_kv=[end - first])
    return out.reshape(heads, -1), sums.reshape(heads)
(one, one_sum), (two, two_sum) = part(0, 2), part(2, count)
merged, _ = torch_npu.npu_attention_update((one_sum, two_sum), (one, two), 0)
found["merged"] = (merged.cpu() - flat.cpu().reshape(heads, -1)).abs().max().item()

# What is quantised comes back within half a step.
values, scale = torch_npu.npu_dynamic_quant(x)
found["quantised"] = ((values.cpu().float() * scale.cpu()[:, None] - x.cpu()).abs() / scale.cpu()[:, None]).max().item()
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(library):
    variables = os.environ | engine_variables(RELEASED, library)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env=variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def test_an_operator_runs_on_the_stream_later_than_it_is_submitted(found):
    assert found["later"] == [0, True, 1]


@pytest.mark.parametrize("what", ["norm", "paged", "flat", "sparse", "merged"])
def test_it_computes_what_plain_torch_computes(found, what):
    assert found[what] < 1e-5


def test_what_is_quantised_comes_back_within_half_a_step(found):
    assert 0 < found["quantised"] < 0.501
