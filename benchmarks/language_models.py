"""EKFAC and influence of language models, beside kronfluence, bergson and TRAK where they are installed.

    python benchmarks/language_models.py [--device cpu|cuda] [--only llama-tiny] [--repeats 1] [--out FILE]
    python benchmarks/language_models.py --coverage      # which parameters every package treats, for every model
    python benchmarks/language_models.py --errors        # of the indices' inner products, for the models of a CPU

Random weights (speed does not depend on them), tokens at random, float32. The tools do not cover the same parameters:

- kronfluence: `nn.Linear` and convolutions, so neither embeddings, normalisations nor GPT-2's Conv1D; with the head;
- bergson: linear layers (and Conv1D) of `model.base_model`, so without the head;
- TRAK: all parameters, by random projections of whole gradients; its own kernel instead of a Fisher matrix;
- biascope: all parameters, and any selection of them.

So that like is compared with like, `ekfac` and `influence` are of the layers that kronfluence takes, `index` of those
that bergson takes (TRAK of all), and `ekfac-all` is biascope's alone. The empirical Fisher matrix is used, whose labels
are the same for all, and the trace of its EKFAC is compared with the squared gradients by autograd. `influence`:
factors and exact scores of a few queries against all examples. `index`: random features of all examples, on disk; in
biascope's the answer to one query is included, about a percent of the time of the `small` models.
The cases of 100M parameters and more are for a GPU.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from harness import Case, Contender, main
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    family: str
    words: int
    width: int
    inner: int
    layers: int
    heads: int
    examples: int
    tokens: int
    devices: tuple[str, ...] = ("cuda",)


SIZES = {
    "llama-tiny": Size("llama", 2_000, 64, 192, 2, 4, 16, 32, ("cpu", "cuda")),
    "gpt2-tiny": Size("gpt2", 2_000, 64, 256, 2, 4, 16, 32, ("cpu", "cuda")),
    "llama-vocabulary-32000": Size("llama", 32_000, 64, 192, 2, 4, 32, 64, ("cpu", "cuda")),
    "small-gpt2": Size("gpt2", 8_000, 256, 1024, 4, 4, 128, 64, ("cpu",)),
    "small-llama": Size("llama", 8_000, 256, 768, 4, 4, 128, 64, ("cpu",)),
    "gpt2-124M": Size("gpt2", 50_257, 768, 3072, 12, 12, 64, 256),
    "llama-170M-32000": Size("llama", 32_000, 768, 3072, 12, 12, 64, 256),
    "llama-170M-128256": Size("llama", 128_256, 768, 3072, 12, 12, 64, 256),
    "llama-1B": Size("llama", 128_256, 2048, 8192, 16, 32, 32, 512),
}
DIM, QUERIES = 1024, 4


@dataclass(frozen=True)
class State:
    model: nn.Module
    ids: Tensor

    @property
    def data(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "labels": self.ids}

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        return [{"input_ids": ids, "labels": ids} for ids in self.ids.split(size)]

    @property
    def linear(self) -> list[str]:
        """Names of the weights of `nn.Linear` layers."""
        return [f"{name}.weight" for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]

    @property
    def inner(self) -> list[str]:
        """Those without the head: what all packages can do."""
        head = id(self.model.get_output_embeddings().weight)  # type: ignore[operator]
        return [name for name in self.linear if id(self.model.get_parameter(name)) != head]


def build(name: str) -> nn.Module:
    import transformers

    s = SIZES[name]
    if s.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=s.words, n_positions=s.tokens, n_embd=s.width, n_inner=s.inner, n_layer=s.layers, n_head=s.heads
        )
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=s.words, hidden_size=s.width, intermediate_size=s.inner, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=max(1, s.heads // 4), max_position_embeddings=s.tokens,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def setup(name: str, device: str) -> State:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    s = SIZES[name]
    return State(build(name).to(device), torch.randint(0, s.words, (s.examples, s.tokens)).to(device))


def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(input_ids=ids).logits[:, :-1]
    return -nn.functional.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


# ---- EKFAC ----


def biascope_ekfac(state: State, params: list[str] | None = None) -> Tensor:
    import biascope as bs

    F = bs.fisher(state.model, state.data, "ekfac", estimator="empirical", params=params)
    return F.trace()


def kronfluence_ekfac(state: State, names: list[str] | None = None) -> Tensor:
    """The trace; of the weights with these names, if they are given."""
    import copy

    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.utils.state import State as Processes

    task = kronfluence_task([name.removesuffix(".weight") for name in names] if names else None)
    arguments = FactorArguments(use_empirical_fisher=True)
    net = prepare_model(copy.deepcopy(state.model), task).to(state.ids.device)
    device = Processes(cpu=not state.ids.is_cuda)
    common = {"model": net, "state": device, "factor_args": arguments, "disable_tqdm": True}
    loader = state.batches(8)
    _, covariances = fit_covariance_matrices_with_loader(task=task, loader=loader, **common)
    eigen = perform_eigendecomposition(covariances, **common)
    n, scalings = fit_lambda_matrices_with_loader(task=task, loader=loader, eigen_factors=eigen, **common)
    return torch.stack([s.sum().cpu() / int(n) for s in scalings["lambda_matrix"].values()]).sum()


def bergson_ekfac(state: State) -> Tensor:
    """Trace of the corrected factors of the layers of `base_model`, which bergson writes to disk."""
    from bergson import IndexConfig
    from bergson.config import HessianConfig
    from bergson.hessians.hessian_approximations import fit_factored_hessians
    from datasets import Dataset
    from safetensors.torch import load_file

    state.model.requires_grad_(False)  # as `bergson hessian` does
    state.model.get_input_embeddings().requires_grad_(True)  # type: ignore[operator]
    rows = state.ids.cpu().tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows, "length": [len(r) for r in rows]})
    with tempfile.TemporaryDirectory() as folder:
        config = IndexConfig(run_path=f"{folder}/hessian", loss_reduction="sum")
        config.partial_run_path.mkdir(parents=True, exist_ok=True)
        try:
            fit_factored_hessians(
                state.model, data, config, HessianConfig(method="kfac", ev_correction=True, use_dataset_labels=True),
                target_modules=None, attention_cfgs={}, path=str(config.partial_run_path), do_eigendecomposition=True,
                batches=[list(range(i, min(i + 8, len(rows)))) for i in range(0, len(rows), 8)],
            )  # fmt: skip
        finally:
            state.model.requires_grad_(True)
        found = load_file(config.partial_run_path / "eigenvalue_correction_sharded" / "shard_0.safetensors")
        return torch.stack([s.double().sum() for s in found.values()]).sum()


def kronfluence_task(modules: list[str] | None = None) -> Any:
    from kronfluence.task import Task

    class LanguageModel(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return -log_likelihood(model, batch["input_ids"])

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str] | None:
            return modules

    return LanguageModel()


def squared_gradients(state: State, names: list[str] | None = None) -> Tensor:
    """Mean over the examples of the squared gradients of the linear layers, or of the weights with these names."""
    params = [p for name, p in state.model.named_parameters() if name in set(names or state.linear)]
    total = torch.zeros((), dtype=torch.float64)
    for ids in state.ids.split(1):
        grads = torch.autograd.grad(log_likelihood(state.model, ids), params)
        total += sum(g.double().square().sum().cpu() for g in grads)
    return total / len(state.ids)


# ---- influence ----


def biascope_influence(state: State) -> Tensor:
    import biascope as bs

    F = bs.fisher(state.model, state.data, "ekfac", estimator="empirical", params=state.linear)
    damping = 0.1 * float(F.trace()) / F.shape[0]
    queries = {k: v[:QUERIES] for k, v in state.data.items()}
    return bs.influence(state.model, state.data, queries, F, damping=damping).scores


def biascope_index(state: State) -> None:
    """Features of the layers that bergson takes, in a folder."""
    import biascope as bs

    layers = base_layers(state.model)
    for p in state.model.parameters():
        p.requires_grad_(id(p) in layers)
    query = {k: v[:1] for k, v in state.data.items()}
    with tempfile.TemporaryDirectory() as folder:
        bs.influence(state.model, state.data, query, None, damping=0.0, dim=DIM, store=f"{folder}/features")


def base_layers(model: nn.Module) -> dict[int, int]:
    """Sizes of the weights of linear layers of the model without its head."""
    layers = [m for m in model.base_model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]  # type: ignore[operator]
    return {id(m.weight): m.weight.numel() for m in layers}


def kronfluence_influence(state: State) -> Tensor:
    import copy

    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from torch.utils.data import Dataset

    class Rows(Dataset[dict[str, Tensor]]):
        def __init__(self, ids: Tensor) -> None:
            self.ids = ids.cpu()

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"input_ids": self.ids[i]}

    task = kronfluence_task()
    net = prepare_model(copy.deepcopy(state.model), task)
    train, queries = Rows(state.ids), Rows(state.ids[:QUERIES])
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("benchmark", net, task, cpu=not state.ids.is_cuda, output_dir=folder, disable_tqdm=True)
        arguments = FactorArguments(use_empirical_fisher=True)
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=8, factor_args=arguments)
        analyzer.compute_pairwise_scores(
            "scores", "ekfac", queries, train, per_device_query_batch_size=QUERIES, per_device_train_batch_size=8
        )
        return analyzer.load_pairwise_scores("scores")["all_modules"]


def bergson_index(state: State) -> None:
    """The index of projected gradients, 16 x 16 numbers per layer, as `bergson build` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        bergson_build(state, folder)


def bergson_build(state: State, folder: str, seed: int | None = None) -> Any:
    """The same into a folder; where its parts are."""
    from bergson import GradientProcessor, IndexConfig, collect_gradients
    from datasets import Dataset

    state.model.requires_grad_(False)  # as `bergson build` does
    state.model.get_input_embeddings().requires_grad_(True)  # type: ignore[operator]
    rows = state.ids.cpu().tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows, "length": [len(r) for r in rows]})
    config = IndexConfig(run_path=f"{folder}/index", projection_dim=16)
    config.partial_run_path.mkdir(parents=True, exist_ok=True)
    batches = [list(range(i, min(i + 8, len(rows)))) for i in range(0, len(rows), 8)]
    processor = GradientProcessor(projection_dim=16, projection_seed=seed)
    collect_gradients(state.model, data, processor, config, batches=batches)
    return config.partial_run_path


def trak_index(state: State) -> None:
    """Features of all training examples, as TRAK makes them."""
    from torch.func import functional_call
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, ProjectionType

    class LanguageModel(AbstractModelOutput):
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(model: nn.Module, weights: Any, buffers: Any, ids: Tensor) -> Tensor:
            z = functional_call(model, (weights, buffers), kwargs={"input_ids": ids[None]}).logits[:, :-1]
            return -nn.functional.cross_entropy(z.flatten(0, 1), ids[1:], reduction="sum")

        def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            return torch.ones(len(batch[0]), 1, device=batch[0].device)

    size = sum(p.numel() for p in state.model.parameters())
    slow = None
    if not state.ids.is_cuda:
        slow = BasicProjector(size, DIM, 0, ProjectionType.rademacher, "cpu", block_size=64)
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            state.model, LanguageModel(), len(state.ids), save_dir=folder, device=str(state.ids.device), proj_dim=DIM,
            projector=slow, use_half_precision=False,
        )  # fmt: skip
        traker.load_checkpoint(state.model.state_dict(), model_id=0)
        for ids in state.ids.split(8):
            traker.featurize(batch=(ids,), num_samples=len(ids))
        traker.finalize_features()


# ---- cases ----


def ekfac(name: str) -> Case:
    """The layers that kronfluence knows, of which a GPT-2 has none but its head."""
    theirs = Contender("kronfluence", kronfluence_ekfac, ("kronfluence", "accelerate"))
    ours = Contender("biascope", lambda s: biascope_ekfac(s, s.linear))
    return Case(
        f"ekfac-{name}", lambda d: setup(name, d), (ours, theirs), squared_gradients, 2e-3, devices=SIZES[name].devices
    )


def ekfac_inner(name: str) -> Case:
    """The layers that all three know: without the head, which bergson leaves out."""
    contenders = (
        Contender("biascope", lambda s: biascope_ekfac(s, s.inner)),
        Contender("kronfluence", lambda s: kronfluence_ekfac(s, s.inner), ("kronfluence", "accelerate")),
        Contender("bergson", bergson_ekfac, ("bergson", "datasets")),
    )
    reference = lambda s: squared_gradients(s, s.inner)  # noqa: E731
    return Case(
        f"ekfac-inner-{name}", lambda d: setup(name, d), contenders, reference, 2e-3, devices=SIZES[name].devices
    )


def whole(name: str) -> Case:
    """All parameters: nobody else's."""
    ours = Contender("biascope", biascope_ekfac)
    return Case(f"ekfac-all-{name}", lambda d: setup(name, d), (ours,), devices=SIZES[name].devices)


def influence(name: str) -> Case:
    """Factors and exact scores on the same layers."""
    theirs = Contender("kronfluence", kronfluence_influence, ("kronfluence", "accelerate"))
    ours = Contender("biascope", biascope_influence)
    return Case(f"influence-{name}", lambda d: setup(name, d), (ours, theirs), devices=SIZES[name].devices)


def index(name: str) -> Case:
    """Random features of gradients, to be searched later: TRAK's of all parameters, the others' without the head."""
    contenders = (
        Contender("biascope", biascope_index),
        Contender("bergson", bergson_index, ("bergson", "datasets")),
        Contender("trak", trak_index, ("trak",), cpu_limit=60),
    )
    return Case(f"index-{name}", lambda d: setup(name, d), contenders, devices=SIZES[name].devices)


LLAMAS = [name for name in SIZES if "llama" in name]
CASES = [
    *(ekfac(name) for name in LLAMAS),
    *(ekfac_inner(name) for name in LLAMAS),
    *(whole(name) for name in SIZES),
    *(influence(name) for name in LLAMAS),
    *(index(name) for name in SIZES),
]


def coverage() -> None:
    """The share of the parameters that each package treats."""
    for name in SIZES:
        with torch.device("meta"):
            model = build(name)
        all_of = {id(p): p.numel() for p in model.parameters()}
        linear: dict[int, int] = {}
        for m in model.modules():
            if isinstance(m, nn.Linear):
                linear |= {id(p): p.numel() for p in m.parameters()}
        total = sum(all_of.values())
        shares = {"kronfluence": linear, "bergson": base_layers(model), "trak": all_of, "biascope": all_of}
        text = ", ".join(f"{who} {sum(found.values()) / total:.1%}" for who, found in shares.items())
        print(f"{name}: {total / 1e6:.1f}M parameters; {text}")


def errors(examples: int = 6, seeds: int = 40) -> None:
    """Errors of inner products over the draws, relative to the products of norms: of one example, and of two."""
    from bergson.data import load_gradients

    import biascope as bs

    for name in [name for name in SIZES if "cpu" in SIZES[name].devices and "vocabulary" not in name]:
        state = setup(name, "cpu")
        state = State(state.model, state.ids[:examples])
        layers = base_layers(state.model)
        for p in state.model.parameters():
            p.requires_grad_(id(p) in layers)
        exact = bs.influence(state.model, state.data, state.data, None, damping=0.0).scores
        norms = exact.diagonal().sqrt()
        off: dict[str, list[Tensor]] = {}
        for seed in range(seeds):
            ours = bs.influence(state.model, state.data, state.data, None, damping=0.0, dim=DIM, seed=seed).scores
            off.setdefault(f"biascope, {DIM} numbers", []).append(ours - exact)
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                rows = torch.from_numpy(load_gradients(bergson_build(state, folder, seed)).copy())
            off.setdefault(f"bergson, {rows.shape[1]} numbers", []).append(rows @ rows.T - exact)
        for who, found in off.items():
            squares = (torch.stack(found) / norms / norms[:, None]).square().mean(0)
            one = squares.diagonal().mean()
            two = (squares.sum() - squares.trace()) / (examples * (examples - 1))
            print(f"{name} ({len(layers)} layers), {who}: own {one**0.5:.4f}, others {two**0.5:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--errors", action="store_true")
    chosen, rest = parser.parse_known_args()
    if chosen.coverage:
        coverage()
    elif chosen.errors:
        errors()
    else:
        sys.argv[1:] = rest
        main(CASES, __file__)
