"""Kernels on disk: computed tile by tile into one memory-mapped array, by any number of processes.

What a kernel is computed from stands in its folder: shapes, and hashes of all that determines it, which are the
differentiated parameters, the others and the buffers, by name, and the data. Code has no hash that could be trusted:
whether the network and the output function are those of the folder is seen on a few of its entries, which every process
that joins computes for itself. The folder also says how the kernel is cut and in how much memory a tile is computed, so
that the bits of a tile do not depend on who computes it (on one kind of processor, with one number of threads).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from biascope.kernels.empirical import LOSSY, Job, Outputs, cotangents, measure_error
from biascope.kernels.fingerprint import fingerprint, inputs_fingerprint
from biascope.kernels.kernel import Kernel
from biascope.kernels.plan import Strategy
from biascope.kernels.store import FORMAT, Store
from biascope.network.functional import Functional
from biascope.network.stream import anatomy
from biascope.support.bars import counted
from biascope.support.errors import CorruptError, InputError
from biascope.support.inputs import Inputs, batch_size, take
from biascope.support.memory import budget as memory_budget
from biascope.support.precision import Precision, arithmetic
from biascope.support.signatures import checked

SAME = {"float64": 1e-8, "float32": 1e-3, "tf32": 0.1, "bf16": 0.1}  # relative; what rounding may do
SAMPLE = 3  # examples of which a few entries tell one network from another


def stored_ntk(
    f: Functional,
    one: Inputs,
    two: Inputs | None,
    outputs: Outputs,
    strategy: Strategy,
    precision: Precision,
    max_memory: str | int | None,
    path: Path,
    check: bool | None = None,
    wait: bool = True,
) -> Kernel | None:
    """Compute a kernel into a folder, together with whoever else does; finished tiles found there are kept.

    Without `wait`, None if the last tiles are in the hands of others.
    """
    with arithmetic(precision):
        found = anatomy(f, one)
        mode, cot = cotangents(outputs, found.outputs)
        n1, n2 = batch_size(one), batch_size(one if two is None else two)
        k, limit = len(cot), memory_budget(max_memory, f.device)
        shape = {"full": (k, n1, k, n2), "trace": (n1, n2), "diagonal": (k, n1, n2)}[mode]
        side = max(1, math.isqrt(limit // 4 // (f.dtype.itemsize * math.prod(shape) // (n1 * n2))))
        side = -(-max(n1, n2) // -(-max(n1, n2) // side))  # equal tiles
        few = slice(0, SAMPLE)
        other = None if two is None else take(two, few)
        sample = Job.make(f, found, take(one, few), other, outputs, strategy, precision, limit).run()[0].flatten()
        sample = sample[:: -(-len(sample) // 64)].double().cpu()
        config = {
            "format": FORMAT,
            "shape": list(shape),
            "dtype": str(f.dtype).removeprefix("torch."),
            "mode": mode,
            "outputs": outputs,
            "symmetric": two is None,
            "precision": precision,
            "kind": "ntk",
            "model_outputs": found.outputs,
            "data": inputs_fingerprint(one, two),
            "parameters": fingerprint(f.params),
            "frozen": fingerprint(f.frozen),
            "sample": sample.tolist(),
        }
        first, before = None, 0
        with Store.join(path, config, {"side": side, "budget": limit}) as store:
            _refuse_other_network(store, sample)
            limit = min(limit, store.config["budget"]) if max_memory is not None else store.config["budget"]

            def new(_: object) -> int:
                nonlocal before
                before, added = len(store.done), len(store.done) - before
                return added

            for place in counted(store.work(wait), f"tiles of {path.name}", len(store.places), new):
                r, c = store.slices(place)
                other = None if two is None and r == c else take(one if two is None else two, c)
                job = Job.make(f, found, take(one, r), other, outputs, strategy, precision, limit)
                first = first or job.plan
                store.deliver(job.run()[0], place)
            if store.missing or not store.verified:
                return None
            values = store.values()
            wanted = check if check is not None else precision in LOSSY
            error = measure_error(f, found, one, two, outputs, mode, values) if wanted else None
            store.note_error(error)
    return Kernel(values, outputs, mode, two is None, first, error, model_outputs=found.outputs)


def _refuse_other_network(store: Store, sample: Tensor) -> None:
    """Raise if the entries that the folder was made with are not those of this network."""
    theirs = torch.tensor(store.config["sample"], dtype=torch.float64, device="cpu")
    error = float((theirs - sample).norm() / sample.norm())
    if error > SAME[store.config["precision"]]:
        raise InputError(
            f"{store.path} holds another kernel: its entries are {error:.2g} (relative) from those of this network and "
            "output function. Choose another folder"
        )


@checked
def open_kernel(path: str | Path, verify: bool = True) -> Kernel:
    """Open a finished kernel on disk, memory-mapped; every tile's checksum is compared if `verify`.

    Example:
        >>> import tempfile, torch, biascope as bs
        >>> net = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = bs.ntk(net, torch.randn(4, 3), store=folder)
        ...     open_kernel(folder).tensor.shape
        torch.Size([4, 2, 4, 2])
    """
    store = Store.open(Path(path))
    left = store.missing + (store.damaged() if verify else [])
    if left:
        raise CorruptError(
            f"{path} holds an unfinished kernel: {len(left)} tiles are missing; run bs.ntk(..., store=) again"
        )
    config = store.config
    known = {"error": config.get("error"), "model_outputs": config.get("model_outputs")}
    return Kernel(store.values(), config["outputs"], config["mode"], config["symmetric"], **known)
