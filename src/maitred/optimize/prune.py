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
from maitred.optimize.calibrate import CalibratedLayer, first_tokens, layer_state, walk_layers
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
    if own.pattern == "none":
        layers, changes = _sizes(job, spec)
        child = spec_from_config(child_config(job.parent, changes))
        kept = _walked(job, "layers", lambda layer: _cut(layer, spec, child, layers), "cutting layers")
        job.notes |= {
            "neurons": f"{child.intermediate_size} of {spec.intermediate_size} in each layer",
            "heads": f"{child.num_heads} of {spec.num_heads}, {child.num_kv_heads} of {spec.num_kv_heads} for keys and "
            "values",
            "layers": f"{len(layers)} of {spec.num_layers}",
            "layers_kept": layers,
            "parameters": f"{child.num_parameters():,} of {spec.num_parameters():,}",
            "foretold_gain": round(spec.num_parameters() / child.num_parameters(), 3),
        }
    else:
        layers, changes, child = list(range(spec.num_layers)), {}, spec
        if odd := [width for width in (spec.hidden_size, spec.q_width, spec.intermediate_size) if width % 4]:
            raise ConfigError(f"2:4 needs rows of whole fours; {spec.architecture} has rows of {odd[0]}")
        kept = _walked(job, "layers", lambda layer: _sparse(layer, own.method), f"2:4 by {own.method}")
        job.notes["kernel"] = "none reads 2:4 here: zeroes are stored and multiplied like other weights"
    decoder = _assembled(job, spec, child, [kept[index] for index in layers])
    if budget is not None:  # train the child on its parent's distributions
        decoder.requires_grad_(True)
        loss = imitation(decoder, load_torch_decoder(spec, job.parent))
        batches = batches_of(job.corpus.learn, seed=job.config.seed, num_tokens=RECOVERY_TOKENS)
        job.notes["recovery"] = train(decoder, loss, batches, budget, job.state, job.progress).told()
    save_decoder(decoder, job.parent, job.folder, changes)


TOOL = Tool("prune", make)


def _walked(
    job: Job, name: str, see: Callable[[CalibratedLayer], dict[str, Tensor]], words: str
) -> list[dict[str, Tensor]]:
    """What `see` gives of each layer in turn, as it sees the documents that are learnt from."""
    tokens = first_tokens((each.ids.tolist() for each in job.corpus.learn), CALIBRATION_TOKENS)
    state, num_layers = job.state / name, spec_from_config(job.parent.config).num_layers
    walk_layers(job.parent, tokens, see, state=state, on_layer=lambda done, total: job.progress(done, total, words))
    return [layer_state(state, index) for index in range(num_layers)]


def _sizes(job: Job, spec: DecoderSpec) -> tuple[list[int], dict[str, Any]]:
    """Layers that are kept, by their numbers, and the child's changes of the config. Raises ConfigError for what cannot
    be taken out."""
    own: PruneConfig = job.own
    if own.heads and spec.qk_norm is QKNorm.FULL_WIDTH:
        raise ConfigError(f"{spec.architecture} normalises all heads as one vector; prune its neurons or layers")
    if own.layers >= spec.num_layers:
        raise ConfigError(f"--layers is {own.layers}, and the model has {spec.num_layers}; leave at least one")
    neurons = _size("neurons", own.neurons, spec.intermediate_size, UNIT)
    groups, layers = _size("heads", own.heads, spec.num_kv_heads, 1), list(range(spec.num_layers))
    if own.layers:
        influence = [kept["influence"] for kept in _walked(job, "influence", _influence, "weighing layers")]
        layers = largest(torch.stack(influence), spec.num_layers - own.layers).tolist()
    return layers, {
        **layer_changes(job.parent, layers),
        "intermediate_size": neurons,
        "num_attention_heads": groups * spec.num_heads // spec.num_kv_heads,
        "num_key_value_heads": groups,
    }


def _size(what: str, share: float, total: int, unit: int) -> int:
    if not share:
        return total
    size = max(1, round(total * (1 - share) / unit)) * unit
    if size >= total:
        least = f"; give at least {(unit / 2 + 0.01) / total:.2f}" if total > unit else ""
        raise ConfigError(f"--{what} {share:g} of {total} takes out no whole {unit}{least}")
    return size


def _influence(layer: CalibratedLayer) -> dict[str, Tensor]:
    """How far the layer turns the residual stream."""
    turned: list[Tensor] = []
    hook = layer.module.register_forward_hook(
        lambda _, inputs, output: turned.append(1 - cosine_similarity(inputs[0], output, dim=-1))
    )
    for _ in layer.run():
        pass
    hook.remove()
    return {"influence": torch.cat(turned).mean()}


def _cut(layer: CalibratedLayer, spec: DecoderSpec, child: DecoderSpec, layers: Sequence[int]) -> dict[str, Tensor]:
    """The layer's weights in the child, which make up for those that are gone; none of a layer that goes."""
    if layer.index not in layers:
        for name in ("attention_output", "down"):  # so that the walk passes it by
            for parameter in layer.module.get_submodule(name).parameters():
                parameter.zero_()
        return {}
    groups, neurons = torch.arange(spec.num_kv_heads), torch.arange(spec.intermediate_size)
    if child.num_kv_heads < len(groups):
        groups = _narrow(layer, "attention_output", spec.q_width // len(groups), child.num_kv_heads)
    if child.intermediate_size < len(neurons):
        neurons = _narrow(layer, "down", 1, child.intermediate_size)
    places = left_of_linears(spec, groups, neurons)
    return {name: _sliced(parameter, name, places) for name, parameter in layer.module.named_parameters()}


def _sliced(parameter: Tensor, name: str, places: dict[str, Tensor]) -> Tensor:
    linear, _, kind = name.partition(".")
    if linear in ("qkv", "gate_up"):
        return parameter.data[places[linear]]
    return parameter.data[:, places[linear]] if linear in places and kind == "weight" else parameter.data


def left_of_linears(spec: DecoderSpec, groups: Tensor, neurons: Tensor) -> dict[str, Tensor]:
    """What is left of a layer with these KV groups and neurons: rows of qkv and gate_up, columns of the others."""
    queries, keys = (_places(groups, width // spec.num_kv_heads) for width in (spec.q_width, spec.kv_width))
    return {
        "qkv": torch.cat((queries, spec.q_width + keys, spec.q_width + spec.kv_width + keys)),
        "attention_output": queries,
        "gate_up": torch.cat((neurons, spec.intermediate_size + neurons)),
        "down": neurons,
    }


def _places(parts: Tensor, width: int) -> Tensor:
    return (parts[:, None] * width + torch.arange(width)).flatten()


def largest(score: Tensor, count: int) -> Tensor:
    """Places of the largest numbers, in order."""
    return score.topk(count).indices.sort().values


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
    kept = largest(added_P, count)
    columns = _places(kept, width)
    fitted_KD = torch.linalg.solve(moment_KK[columns][:, columns], moment_KK[columns] @ full_DK.T)
    weight_DK.zero_()
    weight_DK[:, columns] = fitted_KD.T.to(weight_DK.dtype)
    return kept


def _sparse(layer: CalibratedLayer, method: str) -> dict[str, Tensor]:
    """The layer with two zeroes in each four weights of a row."""
    for name, inputs in seen_inputs(layer).items():
        weight_DK = layer.module.get_parameter(f"{name}.weight")
        weight_DK.copy_(SPARSE[method](weight_DK, inputs.hessian, f"layers.{layer.index}.{name}"))
    return {name: parameter.data for name, parameter in layer.module.named_parameters()}


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
