"""Hugging Face models, the library's vision transformer, and distributed data parallel."""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope import nets
from biascope.support.errors import InputError, UnsupportedError
from tangent.linearize_zoo import displace


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, **options
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model.double().eval()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (3, 7), generator=torch.Generator().manual_seed(0))
    ids[0, 5:] = 0  # padding
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hugging_face_encoder(attention: str) -> None:
    net, x = bert(attn_implementation=attention, num_labels=4), tokens()
    lin = bs.linearize(net)
    assert list(lin.state_dict()) == list(net.state_dict())
    out, plain = lin(**x, output_hidden_states=True), net(**x, output_hidden_states=True)
    assert type(out) is type(plain)
    torch.testing.assert_close(out.logits, plain.logits)
    torch.testing.assert_close(out.hidden_states[1], plain.hidden_states[1])
    displace(lin, 0.02)
    assert list(lin._forward_mode.values()) == ["by hand"]
    J = bs.Jacobian(net, x, precision="float64")
    torch.testing.assert_close(lin(**x).logits, plain.logits + J @ lin.displacement)
    u = torch.randn(3, 4, dtype=torch.float64)
    (lin(**x).logits * u).sum().backward()
    grads = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in lin.parameters()])
    torch.testing.assert_close(grads, (J.T @ u).as_subclass(Tensor))
    with pytest.raises(InputError, match="looks like a loss"):
        lin(**x, labels=torch.tensor([0, 1, 2]))


@pytest.mark.slow
def test_hugging_face_decoder_cache_is_refused_or_linearised() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    net = transformers.GPT2LMHeadModel(config).double().eval()
    ids = tokens()["input_ids"]
    lin = bs.linearize(net)
    displace(lin, 0.02)
    J = bs.Jacobian(net, {"input_ids": ids}, precision="float64", output=lambda out: out.logits)
    expected = net(ids).logits + (J @ lin.displacement).reshape(3, 7, 40)
    torch.testing.assert_close(lin(ids, use_cache=False).logits, expected)
    try:
        out = lin(ids, use_cache=True)
    except UnsupportedError as refused:
        assert "Cache" in str(refused)  # noqa: PT017
    else:
        torch.testing.assert_close(out.logits, expected)


def test_vision_transformer() -> None:
    net = nets.build("vit", 0).double().eval()
    x = torch.randn(2, *nets.info("vit").input_shape, dtype=torch.float64)
    grads = []
    for engine in ("vjp", "jvp"):
        lin = bs.linearize(net, engine=engine)
        displace(lin, 0.01)
        out = lin(x)
        torch.testing.assert_close(out, net(x) + bs.Jacobian(net, x, precision="float64") @ lin.displacement)
        grads.append(torch.autograd.grad(out.sum(), list(lin.parameters())))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)  # every process starts elsewhere; DDP takes the parameters of process 0
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    lin = bs.linearize(net)
    lin.synchronize()
    ddp = nn.parallel.DistributedDataParallel(lin)
    data = torch.load(f"{folder}/data.pt")
    sgd = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(5):
        ddp.train()
        sgd.zero_grad()
        half = slice(4 * rank, 4 * rank + 4)
        (ddp(data["x"][half]) - data["y"][half]).square().mean().backward()
        sgd.step()
    torch.save({"state": lin.state_dict(), "net": net.state_dict(), "f": lin(data["x"])}, f"{folder}/out{rank}.pt")
    torch.distributed.barrier()  # gloo aborts a process that leaves while the other still talks to it
    del ddp, sgd
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_trains_like_one_process() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"x": x, "y": y}, Path(folder) / "data.pt")
        torch.multiprocessing.spawn(_worker, (folder,), nprocs=2)
        outs = [torch.load(Path(folder) / f"out{rank}.pt") for rank in (0, 1)]
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    net.load_state_dict(outs[0]["net"])
    lin = bs.linearize(copy.deepcopy(net))
    sgd = torch.optim.SGD(lin.parameters(), 0.1)
    for _ in range(5):
        sgd.zero_grad()
        (lin(x) - y).square().mean().backward()
        sgd.step()
    for out in outs:
        torch.testing.assert_close(out["f"], lin(x))
        for k, p in lin.named_parameters():
            torch.testing.assert_close(out["state"][k], p.detach())
