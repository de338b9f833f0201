"""`maitred quantize`: a model's linears in 4 or 8 bits, rounded layer by layer on what the layers before them give."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from maitred.config.optimize import QuantizeConfig
from maitred.executor.torch import torch_threads
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec, parameter_shapes
from maitred.model.torch_decoder import TorchDecoder, load_part, load_torch_decoder
from maitred.optimize.calibrate import (
    LINEARS,
    CalibratedLayer,
    attend_of,
    embedded,
    first_tokens,
    layer_state,
    rotations_of,
    save_layer,
    walk_layers,
)
from maitred.optimize.gate import judge
from maitred.optimize.job import Job, Tool, measured
from maitred.optimize.rounding import Form, Rounded, gptq, nearest, round_to_nearest
from maitred.optimize.scaling import SCALES, fold, scale_layer, seen_inputs
from maitred.optimize.trainer import ADAMW_LR, Budget, batches_of, imitation, train
from maitred.optimize.write import child_config, describe_gguf, save_compressed, save_gguf

BITS = {"int8": (8,), "int4": (4,), "mixed": (4, 8)}
GROUP = 32  # weights that share an int4 scale unless asked: as many as a block that serves them
ALONE_TOKENS = 256  # tokens on which each linear is judged alone
HALF = 0.5  # of the KL that is left, which each round of `mixed` takes away by promoting linears
QAT_MINUTES, QAT_TOKENS, QAT_LR = 3.0, 1024, 1e-5
"""Of qat, unless asked: time, tokens of a step, and AdamW's peak."""

Choice = dict[tuple[int, str], Form]  # form of each linear, by layer and name


def make(job: Job) -> None:
    """Fill the job's folder: round all layers, judge each linear alone, and write; `mixed` then promotes linears."""
    config: QuantizeConfig = job.own
    spec, forms = spec_from_config(job.parent.config), forms_of(config)
    if config.to == "gguf" and job.parent.gguf is None:
        describe_gguf(job.parent, job.state / "described.gguf")
    if config.kv_dtype != "auto":
        job.served["kv_dtype"] = config.kv_dtype
    dtype = getattr(torch, child_config(job.parent, {})["dtype"])
    documents = first_tokens((each.ids.tolist() for each in job.corpus.learn), config.calibration_tokens)
    job.need_memory(_memory_bytes(spec, sum(map(len, documents))), "a layer and the documents' hidden states")
    walk_layers(
        job.parent,
        documents,
        lambda layer: quantize_layer(layer, spec, forms, config.method, dtype),
        state=job.state / "layers",
        on_layer=lambda done, total: job.progress(done, total, "rounding layers"),
    )
    if config.method == "qat":
        _train(job, spec, next(iter(forms.values())))
    choice = {(index, name): next(iter(forms.values())) for index in range(spec.num_layers) for name in LINEARS}
    alone = kl_alone(job, spec, choice, first_tokens((ids[:64] for ids in documents), ALONE_TOKENS), dtype)
    _write(job, choice)
    if config.scheme == "mixed":
        _promote(job, choice, forms[8], alone, spec)
    job.notes |= _told(job, spec, choice, alone)


TOOL = Tool("quantize", make)


def _memory_bytes(spec: DecoderSpec, num_tokens: int) -> int:
    widest = max(spec.hidden_size, spec.q_width, spec.intermediate_size)
    layer = 4 * (2 * spec.hidden_size * (spec.q_width + spec.kv_width) + 3 * spec.hidden_size * spec.intermediate_size)
    return 4 * layer + 4 * 8 * widest**2 + 4 * num_tokens * spec.hidden_size


def forms_of(config: QuantizeConfig) -> dict[int, Form]:
    """By bits. int8 has a scale for each row, unless groups are asked for."""
    group = {4: config.group_size or GROUP, 8: config.group_size}
    return {bits: Form(bits, group[bits], config.symmetric or bits == 8) for bits in BITS[config.scheme]}


def quantize_layer(
    layer: CalibratedLayer, spec: DecoderSpec, forms: Mapping[int, Form], method: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Round the layer's linears, and leave the coarsest form's values in it.

    Returns what `rounded_of` reads, the errors of outputs as shares of their squares, the scales that were folded, and
    the layer's other parameters.
    """
    inputs, module, kept = seen_inputs(layer), layer.module, dict[str, Tensor]()
    with torch_threads(1):  # small operations: beside other work, threads would wait for each other far longer
        if method in SCALES:
            scales = scale_layer(module, spec, inputs, next(iter(forms.values())), method, dtype)
            kept |= {f"{name}.fold": scale for name, scale in scales.items()}
        for name in LINEARS:
            weight, seen = module.get_parameter(f"{name}.weight").clone(), inputs[name]
            for bits, form in reversed(list(forms.items())):
                if method in ("gptq", "qat"):
                    rounded = gptq(form, weight, seen.hessian, f"layers.{layer.index}.{name}")
                else:
                    rounded = round_to_nearest(form, weight, seen.hessian.diagonal())
                values = rounded.values()
                share = seen.error(values - weight) / max(seen.error(weight), 1e-30)
                kept[f"{name}.{bits}.error"] = torch.tensor(share)
                kept |= {f"{name}.{bits}.{part}": getattr(rounded, part) for part in ("codes", "scale", "minimum")}
                module.get_parameter(f"{name}.weight").copy_(values)
    others = {name: value for name, value in module.named_parameters() if name.removesuffix(".weight") not in LINEARS}
    return kept | {name: value.clone() for name, value in others.items()}


class FakeRounded(nn.Module):
    """Rounds a linear's weight forwards, on a grid that stays; gradients pass as if it had not (straight-through)."""

    def __init__(self, rounded: Rounded) -> None:
        super().__init__()
        self.form = rounded.form
        self.scale = nn.Buffer(rounded.scale.float()[:, :, None], persistent=False)
        self.minimum = nn.Buffer(rounded.minimum[:, :, None], persistent=False)

    def rounded(self, weight: Tensor) -> Rounded:
        codes, _ = nearest(self.form, weight.detach().view(*self.scale.shape[:2], -1), self.scale, self.minimum)
        scale, minimum = self.scale[:, :, 0].half(), self.minimum[:, :, 0]
        return Rounded(self.form, codes.view_as(weight).to(torch.uint8), scale, minimum)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.rounded(weight).values() - weight).detach()


def _train(job: Job, spec: DecoderSpec, form: Form) -> None:
    """Go on from GPTQ's codes: train the rounded linears on the parent's distributions, and keep the codes in the place
    of GPTQ's. A weight begins as near to the parent's as it can without another code."""
    teacher, student = (load_torch_decoder(spec, job.parent) for _ in range(2))
    for index, layer in enumerate(student.layers):
        kept = layer_state(job.state / "layers", index)
        for name in LINEARS:
            rounded, linear = rounded_of(kept, name, form), layer.get_submodule(name)
            values, weight = rounded.values(), layer.get_parameter(f"{name}.weight")
            step = rounded.scale.float().repeat_interleave(weight.shape[1] // rounded.scale.shape[1], 1)
            weight.copy_(values + (weight - values).clamp(-0.49 * step, 0.49 * step))
            weight.requires_grad_(True)
            register_parametrization(linear, "weight", FakeRounded(rounded))
    steps, minutes = job.config.steps, job.config.minutes or QAT_MINUTES
    budget = Budget(steps=steps, minutes=minutes, lr_scale=QAT_LR / ADAMW_LR, use_muon=False)
    batches = batches_of(job.corpus.learn, seed=job.config.seed, num_tokens=QAT_TOKENS)
    run = train(student, imitation(student, teacher), batches, budget, job.state, job.progress)
    job.notes["training"] = run.told()
    for index, layer in enumerate(student.layers):
        kept = layer_state(job.state / "layers", index)
        for name in LINEARS:
            fake = layer.get_submodule(f"{name}.parametrizations.weight.0")
            assert isinstance(fake, FakeRounded)
            rounded = fake.rounded(layer.get_parameter(f"{name}.parametrizations.weight.original"))
            kept[f"{name}.{form.bits}.codes"] = rounded.codes
            kept.pop(f"{name}.{form.bits}.error", None)  # GPTQ's
        save_layer(job.state / "layers", index, kept)


def rounded_of(kept: Mapping[str, Tensor], name: str, form: Form) -> Rounded:
    return Rounded(form, *(kept[f"{name}.{form.bits}.{part}"] for part in ("codes", "scale", "minimum")))


@torch.no_grad()
def kl_alone(
    job: Job, spec: DecoderSpec, choice: Choice, tokens: Sequence[Sequence[int]], dtype: torch.dtype
) -> dict[tuple[int, str], float]:
    """KL to the parent where only this linear is rounded, of all in one walk: the hidden states of the parent and of
    each parent with a changed linear go through the layers side by side."""
    decoder, lengths = TorchDecoder(spec, hollow=True), [len(ids) for ids in tokens]
    streams = [embedded(job.parent, decoder, [token for ids in tokens for token in ids]).float()]
    for index in range(spec.num_layers):
        job.progress(index, spec.num_layers, "judging each linear alone")
        layer, kept = load_part(decoder, f"layers.{index}", job.parent), layer_state(job.state / "layers", index)
        for name in LINEARS:
            if (scale := kept.get(f"{name}.fold")) is not None:
                fold(layer, spec, name, scale, dtype)

        def run(hidden_TD: Tensor, layer: nn.Module = layer) -> Tensor:
            out: Tensor = layer(hidden_TD, rotations_of(decoder, lengths), attend_of(spec, lengths))
            return out

        changed = []
        for name in LINEARS:
            weight = layer.get_parameter(f"{name}.weight")
            exact = weight.clone()
            weight.copy_(rounded_of(kept, name, choice[index, name]).values())
            changed.append(run(streams[0]))
            weight.copy_(exact)
        streams = [run(stream) for stream in streams] + changed
        layer.to("meta")
    head = "embedding" if decoder.output is None else "output"
    load_part(decoder, "norm", job.parent), load_part(decoder, head, job.parent)
    exact_TV = decoder.logits(decoder.norm(streams[0])).log_softmax(-1)
    found = {}
    for number, (place, stream) in enumerate(zip(choice, streams[1:], strict=True)):
        job.progress(number, len(choice), "comparing each linear alone")
        difference_TV = exact_TV - decoder.logits(decoder.norm(stream)).log_softmax(-1)
        found[place] = float((exact_TV.exp() * difference_TV).sum(-1).mean())
    return found


def _write(job: Job, choice: Choice) -> None:
    """The model of this choice into the job's folder."""

    def layer_of(index: int) -> dict[str, Tensor | Rounded]:
        kept = layer_state(job.state / "layers", index)
        rounded = {f"{name}.weight": rounded_of(kept, name, choice[index, name]) for name in LINEARS}
        return {**kept, **rounded}

    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir()
    if job.own.to == "gguf":
        path = job.state / "described.gguf" if job.parent.gguf is None else job.parent.path
        with open_checkpoint(str(path)) as described:
            save_gguf(job.parent, described, job.folder / "model.gguf", layer_of)
    else:
        save_compressed(job.parent, job.folder, layer_of)


def _promote(job: Job, choice: Choice, form: Form, alone: Mapping[tuple[int, str], float], spec: DecoderSpec) -> None:
    """Give linears the larger form, those first that take away most KL for a byte, until the gate lets the model
    through or all have it."""
    shapes = _shapes(spec)

    def gain(place: tuple[int, str]) -> float:
        rows, columns = shapes[place[1]]
        return alone[place] / (form.bytes_of(rows, columns) - choice[place].bytes_of(rows, columns))

    order, rounds = sorted(choice, key=gain, reverse=True), 0
    while order and judge(job.rules, measured(job)):
        left = HALF * sum(alone[place] for place in order)
        while order and sum(alone[place] for place in order) >= left:
            choice[order.pop(0)] = form
        rounds += 1
        _write(job, choice)
    job.notes["promoted"] = f"{len(choice) - len(order)} of {len(choice)} linears to int{form.bits} in {rounds} rounds"


def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    shapes = parameter_shapes(spec)
    return {name: (shapes[f"layers.0.{name}.weight"][0], shapes[f"layers.0.{name}.weight"][1]) for name in LINEARS}


def _told(job: Job, spec: DecoderSpec, choice: Choice, alone: Mapping[tuple[int, str], float]) -> dict[str, Any]:
    """The report's words: bytes, and by linear its form, error, KL alone and bytes."""
    linears: dict[str, Any] = {}
    for (index, name), form in choice.items():
        error = layer_state(job.state / "layers", index).get(f"{name}.{form.bits}.error")
        linears[f"layers.{index}.{name}"] = {
            "bits": form.bits,
            "error": None if error is None else float(error),
            "kl_alone": alone[index, name],
            "bytes": form.bytes_of(*_shapes(spec)[name]),
        }
    told = {
        "linear_bytes": sum(each["bytes"] for each in linears.values()),
        "model_bytes": sum(
            file.stat().st_size for file in job.folder.iterdir() if file.suffix in (".safetensors", ".gguf")
        ),
        "parent_bytes": job.parent.weight_bytes,
        "worst": max(linears, key=lambda name: float(linears[name]["kl_alone"])),
        "linears": linears,
    }
    if job.parent.has_formats:
        told["parent"] = "quantised itself: its values were expanded, and rounded once more"
    return told
