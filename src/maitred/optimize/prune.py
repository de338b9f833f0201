"""Pruning: neurons, KV groups and layers are taken out, and the weights that are left fitted to the former outputs.

What a part adds to its linear's output decides, E|W_p x_p|^2 over the documents (Wanda, Sun et al., arXiv:2306.11695;
FLAP, An et al., arXiv:2312.11983), and of a layer how little it turns the residual stream (ShortGPT, Men et al.,
arXiv:2403.03853). config.json has one size for all layers, so each loses as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from maitred.config.optimize import PruneConfig
from maitred.core.errors import ConfigError
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec, QKNorm
from maitred.model.torch_decoder import TorchDecoder, load_part, load_torch_decoder
from maitred.optimize.calibrate import CalibratedLayer, layer_state, walk_layers
from maitred.optimize.job import Job, Tool
from maitred.optimize.rounding import sparse_2_4
from maitred.optimize.scaling import seen_inputs
from maitred.optimize.trainer import Budget, batches_of, imitation, train
from maitred.optimize.write import child_config, layer_changes, save_decoder

UNIT = 32  # neurons: whole vectors of every instruction set, and whole blocks of every format
DAMPING = 0.01  # of the mean of a second moment's diagonal
CALIBRATION_TOKENS = 32768
RECOVERY_TOKENS = 2048  # of a batch
LR_SCALE = 0.05


def make(job: Job) -> None:
    spec, own, asked = spec_from_config(job.parent.config), job.own, job.config
    steps, budget = own.recover_steps or asked.steps, None
    if steps or asked.minutes:
        if own.pattern != "none":
            raise ConfigError(
                f"training would undo a {own.pattern} pattern; leave recover_steps, steps and minutes out"
            )
        budget = Budget(steps=steps, minutes=asked.minutes, lr_scale=LR_SCALE)
        job.need_memory(6 * 4 * spec.num_parameters(), "the result, its parent, gradients and the optimiser's state")
    kept = _Kept(job, own, spec) if own.pattern == "none" else None
    decoder = _cut(job, spec, kept) if kept is not None else _sparse(job, spec, own.method)
    if budget is not None:
        _recover(job, decoder, load_torch_decoder(spec, job.parent), budget)
    save_decoder(decoder, job.parent, job.folder, kept.changes if kept is not None else {})


TOOL = Tool("prune", make)


class _Kept:
    """Sizes of the child, and its layers by their numbers in the parent. Raises ConfigError for what cannot be."""

    def __init__(self, job: Job, own: PruneConfig, spec: DecoderSpec) -> None:
        if own.heads and spec.qk_norm is QKNorm.FULL_WIDTH:
            raise ConfigError(f"{spec.architecture} normalises all heads as one vector; prune its neurons or layers")
        if own.layers >= spec.num_layers:
            raise ConfigError(f"--layers is {own.layers}, and the model has {spec.num_layers}; leave at least one")
        self.neurons = _size("neurons", own.neurons, spec.intermediate_size, UNIT)
        self.groups = _size("heads", own.heads, spec.num_kv_heads, 1)
        self.heads = self.groups * spec.num_heads // spec.num_kv_heads
        self.layers = _influential(job, spec, spec.num_layers - own.layers)
        self.changes: dict[str, Any] = {
            **layer_changes(job.parent, self.layers),
            "intermediate_size": self.neurons,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
        }
        self.spec = spec_from_config(child_config(job.parent, self.changes))
        job.notes |= {
            "neurons": f"{self.neurons} of {spec.intermediate_size} in each layer",
            "heads": f"{self.heads} of {spec.num_heads}, {self.groups} of {spec.num_kv_heads} for keys and values",
            "layers": f"{len(self.layers)} of {spec.num_layers}",
            "layers_kept": self.layers,
            "parameters": f"{self.spec.num_parameters():,} of {spec.num_parameters():,}",
            "foretold_gain": round(spec.num_parameters() / self.spec.num_parameters(), 3),
        }


def _size(what: str, share: float, total: int, unit: int) -> int:
    if not share:
        return total
    size = max(1, round(total * (1 - share) / unit)) * unit
    if size >= total:
        least = f"; give at least {(unit / 2 + 0.01) / total:.2f}" if total > unit else ""
        raise ConfigError(f"--{what} {share:g} of {total} takes out no whole {unit}{least}")
    return size


def _documents(job: Job) -> Sequence[Sequence[int]]:
    """What the layers are seen with: of the documents that are learnt from, so many tokens."""
    documents, num_tokens = [], 0
    for document in job.corpus.learn:
        if num_tokens < CALIBRATION_TOKENS:
            documents.append(document.ids.tolist())
            num_tokens += len(documents[-1])
    return documents


def _influential(job: Job, spec: DecoderSpec, count: int) -> list[int]:
    """The layers that turn the residual stream most, in order."""
    if count == spec.num_layers:
        return list(range(count))

    def see(layer: CalibratedLayer) -> dict[str, Tensor]:
        turned: list[Tensor] = []
        hook = layer.module.register_forward_hook(
            lambda _, inputs, output: turned.append(1 - cosine_similarity(inputs[0], output, dim=-1))
        )
        for _ in layer.run():
            pass
        hook.remove()
        return {"influence": torch.cat(turned).mean()}

    state = job.state / "influence"
    walk_layers(job.parent, _documents(job), see, state=state, on_layer=_told(job, "weighing layers"))
    influence = torch.stack([layer_state(state, index)["influence"] for index in range(spec.num_layers)])
    return sorted(influence.topk(count).indices.tolist())


def _cut(job: Job, spec: DecoderSpec, kept: _Kept) -> TorchDecoder:
    """The child, whose weights make up for those that are gone."""
    group_width = spec.num_heads // spec.num_kv_heads * spec.head_dim

    def see(layer: CalibratedLayer) -> dict[str, Tensor]:
        module, cuts = layer.module, {}
        if layer.index not in kept.layers:
            for name in ("attention_output", "down"):  # so that the walk passes it by
                for parameter in module.get_submodule(name).parameters():
                    parameter.zero_()
            return {}
        if kept.groups < spec.num_kv_heads:
            groups = _narrow(layer, "attention_output", group_width, kept.groups)
            queries, keys = _places(groups, group_width), _places(groups, spec.head_dim)
            cuts["qkv"] = torch.cat((queries, spec.q_width + keys, spec.q_width + spec.kv_width + keys))
            cuts["attention_output"] = queries
        if kept.neurons < spec.intermediate_size:
            neurons = _narrow(layer, "down", 1, kept.neurons)
            cuts["gate_up"] = torch.cat((neurons, spec.intermediate_size + neurons))
            cuts["down"] = neurons
        return {name: _sliced(parameter, name, cuts) for name, parameter in module.named_parameters()}

    state = job.state / "layers"
    walk_layers(job.parent, _documents(job), see, state=state, on_layer=_told(job, "cutting layers"))
    layers = [layer_state(state, index) for index in kept.layers]
    return _assembled(job, spec, kept.spec, layers)


def _sliced(parameter: Tensor, name: str, cuts: dict[str, Tensor]) -> Tensor:
    linear, _, kind = name.partition(".")
    if linear not in cuts or (kind == "bias" and linear in ("attention_output", "down")):
        return parameter.data
    return parameter.data.index_select(0 if linear in ("qkv", "gate_up") else 1, cuts[linear])


def _places(parts: Tensor, width: int) -> Tensor:
    return (parts[:, None] * width + torch.arange(width)).flatten()


def _narrow(layer: CalibratedLayer, linear: str, width: int, count: int) -> Tensor:
    """Keep `count` of the linear's input parts, each so wide, by what they add to its output, and fit their weights by
    least squares to the output of all. Returns the numbers of those that are kept."""
    weight_DK = layer.module.get_parameter(f"{linear}.weight")
    moment_KK, full_DK = seen_inputs(layer)[linear].hessian.double(), weight_DK.double()
    moment_KK.diagonal().add_(DAMPING * moment_KK.diagonal().mean() + 1e-12)
    num_parts = weight_DK.shape[1] // width
    parts, each = moment_KK.view(num_parts, width, num_parts, width), torch.arange(num_parts)
    weight_DPW = full_DK.view(-1, num_parts, width)
    added_P = torch.einsum("dpi,pij,dpj->p", weight_DPW, parts[each, :, each], weight_DPW)
    kept = added_P.topk(count).indices.sort().values
    columns = _places(kept, width)
    fitted_KD = torch.linalg.solve(moment_KK[columns][:, columns], moment_KK[columns] @ full_DK.T)
    weight_DK.zero_()
    weight_DK[:, columns] = fitted_KD.T.to(weight_DK.dtype)
    return kept


def _sparse(job: Job, spec: DecoderSpec, method: str) -> TorchDecoder:
    """The parent with two zeroes in each four weights of a row."""
    if odd := [width for width in (spec.hidden_size, spec.q_width, spec.intermediate_size) if width % 4]:
        raise ConfigError(f"2:4 needs rows of whole fours; {spec.architecture} has rows of {odd[0]}")
    job.notes["kernel"] = "none reads 2:4 here: zeroes are stored and multiplied like other weights"

    def see(layer: CalibratedLayer) -> dict[str, Tensor]:
        for name, inputs in seen_inputs(layer).items():
            weight_DK = layer.module.get_parameter(f"{name}.weight")
            weight_DK.copy_(SPARSE[method](weight_DK, inputs.hessian, f"layers.{layer.index}.{name}"))
        return {name: parameter.data for name, parameter in layer.module.named_parameters()}

    state = job.state / "layers"
    walk_layers(job.parent, _documents(job), see, state=state, on_layer=_told(job, f"2:4 by {method}"))
    return _assembled(job, spec, spec, [layer_state(state, index) for index in range(spec.num_layers)])


def _two_of_four(score_DK: Tensor) -> Tensor:
    best = score_DK.view(-1, 4).topk(2).indices
    return torch.zeros(score_DK.numel() // 4, 4, dtype=torch.bool).scatter_(1, best, True).view(score_DK.shape)


SPARSE: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "magnitude": lambda weight_DK, _, __: weight_DK * _two_of_four(weight_DK.abs()),
    "wanda": lambda weight_DK, hessian_KK, _: weight_DK * _two_of_four(weight_DK.abs() * hessian_KK.diagonal().sqrt()),
    "sparsegpt": sparse_2_4,
}
"""Given a matrix, the Hessian of its outputs' error and its name: the matrix with two zeroes in each four weights."""


def _assembled(job: Job, spec: DecoderSpec, child: DecoderSpec, layers: Sequence[dict[str, Tensor]]) -> TorchDecoder:
    """A decoder of these layers between the parent's embedding, norm and output."""
    parent, decoder = TorchDecoder(spec, hollow=True), TorchDecoder(child, hollow=True)
    weights = {f"layers.{index}.{name}": each for index, layer in enumerate(layers) for name, each in layer.items()}
    for name in ("embedding", "norm") if spec.tied_embeddings else ("embedding", "norm", "output"):
        weights |= dict(load_part(parent, name, job.parent).named_parameters(prefix=name))
    decoder.load_state_dict(weights, assign=True)
    return decoder


def _recover(job: Job, decoder: TorchDecoder, teacher: TorchDecoder, budget: Budget) -> None:
    """Train the child on its parent's distributions."""
    decoder.requires_grad_(True)
    batches = batches_of(job.corpus.learn, seed=job.config.seed, num_tokens=RECOVERY_TOKENS)
    run = train(decoder, imitation(decoder, teacher), batches, budget, job.state, job.progress)
    job.notes["recovery"] = run.told()


def _told(job: Job, words: str) -> Any:
    return lambda done, total: job.progress(done, total, words)
