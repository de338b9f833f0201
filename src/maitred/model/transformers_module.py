"""transformers' own module of a model without a native row, over our paged attention.

Nothing is guessed of a module: it is built without memory (PyTorch's meta device) and run for a few tokens, and what it
hands to attention tells layers, heads, windows, scales, sinks, and which layers read the keys of another. What our
attention does not do is refused by name. Weights are the checkpoint's safetensors, code is transformers' alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from maitred.core.errors import CheckpointError
from maitred.model.families import ENCODERS
from maitred.model.spec import AttentionCall, DecoderSpec, LayerSpec, ModuleSpec
from maitred.model.torch_decoder import Attend, tensor_from_raw
from maitred.model.weight_map import HARMLESS, PREFIXES

if TYPE_CHECKING:
    from maitred.model.checkpoint import Checkpoint

SERVED = "maitred"
"""Our attention's name among transformers'; it has no masks, for the pool knows what a token sees."""
LOOKED_AT = "maitred_looked_at"
"""The same while a module is looked at: masks tell what they show, and experts of any width are left out."""

_FAR = 2**20  # the position at which a mask is asked; a longer window counts as none
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_HARMLESS = {"dropout", "is_causal", "output_attentions", "position_ids", "sliding_window", "use_cache"}
_LOADS_MORE = {"auto_map", "distributed_config", "fusion_config", "transformers_weights"}  # than weights

transformers.utils.logging.set_verbosity_error()  # what matters of a load is raised
transformers.utils.logging.disable_progress_bar()


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **more: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: tensors are [1, heads, T, head size]. Returns [1, T, heads, head size]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    told = {name: given for name, given in more.items() if given is not None and name not in _HARMLESS}
    return module.maitred(query, key, value, attention_mask, scale, told)[None], None


def _mask(*, batch_size: int, q_length: int, mask_function: Callable[..., Any], device: Any, **_: Any) -> Any:
    """A mask that is never read. Its `windows` are the numbers of tokens that two late ones see: None is all, 0 stands
    for others than the last ones."""
    mask: Any = torch.empty(batch_size, 1, q_length, q_length, dtype=torch.bool, device=device)
    mask.windows = {_window(mask_function, place) for place in (_FAR, _FAR + 1)}
    return mask


def _window(shows: Callable[..., Any], place: int) -> int | None:
    keys, zero = torch.arange(place + 2), torch.tensor(0)
    shown = torch.as_tensor(shows(zero, zero, torch.tensor(place), keys)).expand(len(keys))
    count = int(shown.sum())
    if not torch.equal(shown, (keys <= place) & (keys > place - count)):
        return 0
    return None if count == place + 1 else count


for _name in (SERVED, LOOKED_AT):
    transformers.AttentionInterface.register(_name, _attention)
AttentionMaskInterface.register(LOOKED_AT, _mask)
ExpertsInterface.register(LOOKED_AT, lambda experts, hidden_TD, *_: hidden_TD)


class _Look:
    """What a module hands to attention, call by call."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.calls: list[AttentionCall] = []
        self.layers: list[LayerSpec] = []
        self.kept: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer
        self.queries: list[tuple[int, float, float | None, bool]] = []  # heads, scale, softcap, has sinks

    def attend(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, told: dict[str, Any]
    ) -> Tensor:
        softcap, sinks = told.pop("softcap", None), told.pop("s_aux", None)
        windows = getattr(mask, "windows", {0})
        (window,) = windows if len(windows) == 1 else (0,)
        places = [i for i, (k, v) in enumerate(self.kept) if k is key and v is value]
        place = places[0] if places else len(self.layers)
        if not places:
            self.kept.append((key, value))
            self.layers.append(LayerSpec(window=window))
        self.queries.append((query.shape[1], scale, softcap, sinks is not None))
        _refuse(
            self._architecture,
            {
                f"{name} attends more than once": any(name == call.module for call in self.calls),
                f"{name} attends by {', '.join(told)}": bool(told),
                f"{name} sees other tokens than the last ones": window == 0,
                f"{name} reads the keys of a layer of another window": self.layers[place].window != window,
                f"{name} caps attention unlike other layers": softcap != self.queries[0][2],
            },
        )
        self.calls.append(AttentionCall(name, place, not places))
        return query.new_empty(query.shape[2], query.shape[1], value.shape[3])


def module_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """Describe a model by transformers' module of it; `layers` are those that keep keys and values.

    Raises CheckpointError, in one line, for what transformers does not have and for what our attention cannot do.
    """
    config, module_class = _config_and_class(checkpoint)
    name, ids = module_class.__name__, torch.zeros(1, 3, dtype=torch.int64, device="meta")
    look = _Look(name)
    try:
        ways = {"attn_implementation": LOOKED_AT, "experts_implementation": LOOKED_AT}
        with torch.device("meta"):
            module = module_class._from_config(config, dtype=torch.bfloat16, **ways).eval()
        decoder = module.get_decoder()
        for part_name, part in decoder.named_modules():
            part.__dict__["maitred"] = partial(look.attend, part_name)
        with torch.no_grad():
            decoder(input_ids=ids, position_ids=ids, attention_mask=ids, use_cache=False)
        num_heads, scale, softcap, _ = look.queries[0]
    except CheckpointError:
        raise
    except Exception as error:  # whatever a module that was not made for this may raise
        _refuse(name, {f"it cannot be looked at without weights ({_line(error)})": True})
    num_calls, num_layers = len(look.calls), config.num_hidden_layers
    _refuse(name, {f"{num_calls} calls of attention are seen in {num_layers} layers": num_calls < num_layers})
    sizes = {(x.shape[1], x.shape[3]) for pair in look.kept for x in pair}
    heads, head_dim = sizes.pop() if len(sizes) == 1 else (1, max(heads * size for heads, size in sizes))
    return DecoderSpec(
        architecture=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=1,  # the module's own affair, as its norms are
        norm_eps=0.0,
        num_heads=num_heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        layers=tuple(look.layers),
        max_position_embeddings=_context(config),
        attention_scale=scale,
        attention_softcap=softcap,
        attention_sinks=any(query[3] for query in look.queries),
        module=ModuleSpec(
            num_parameters=sum(each.numel() for each in module.parameters()),
            calls=tuple(look.calls),
            is_even=not sizes,
            identity=hashlib.sha256((config.to_json_string() + transformers.__version__).encode()).hexdigest(),
        ),
    )


def _refuse(architecture: str, reasons: dict[str, bool]) -> None:
    """Raise CheckpointError for the first that holds."""
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise CheckpointError(f"{architecture} has no native row, and transformers' module of it is not served: {why}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _config_and_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """transformers' config and class of a checkpoint's text model, by name, never by code that the folder brings."""
    raw = checkpoint.config
    text = raw.get("text_config") or raw
    names = raw.get("architectures") or [raw.get("model_type")]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.get("model_type"), ())
    known = (known,) if isinstance(known, str) else tuple(known)
    name = next((each for each in names if each in known), known[0] if known and text is not raw else None)
    if name is None:
        code = "; its own Python code (auto_map) is never run" if raw.get("auto_map") else ""
        raise CheckpointError(
            f"architecture {names[0]!r} has no native row, and transformers {transformers.__version__} has no causal "
            f"model of that name{code}; of encoders {', '.join(ENCODERS)} run, others as ONNX graphs, by "
            "--model-repository"
        )
    module_class = getattr(transformers, name)
    fields = {key: value for key, value in text.items() if key not in _LOADS_MORE and not key.startswith("_")}
    if "tie_word_embeddings" in raw:
        fields.setdefault("tie_word_embeddings", raw["tie_word_embeddings"])
    try:
        config = module_class.config_class.from_dict(fields)
    except Exception as error:
        raise CheckpointError(f"config.json does not describe a {name} ({_line(error)})") from error
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    reasons = {
        "quantised linears need a native row; serve the unquantised model": checkpoint.has_formats,
        "it keeps a recurrent state": module_class._is_stateful,
        f"it has layers of type {', '.join(odd)}": bool(odd),
        "its rope is dynamic": "'dynamic'" in repr(getattr(config, "rope_parameters", None)),
        "its attention cannot be exchanged": not module_class._supports_attention_backend,
    }
    _refuse(name, reasons)
    return config, module_class


def _context(config: Any) -> int:
    """The context that a config claims; the one of its rope unstretched where that depends on a text's length, so that
    requests of one step would change each other's."""
    context, ropes = config.max_position_embeddings, getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if rope.get("rope_type") == "longrope":
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return int(context)


class _Given(nn.Module):
    """Stands where a decoder was, so that what is left of its model makes logits of hidden states."""

    kind: Any  # of a decoder's output
    hidden: Tensor  # [1, T, D]

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.kind(last_hidden_state=self.hidden)


class ModuleDecoder:
    """A module's decoder and its head apart, as `TorchDecoder` has them."""

    def __init__(self, spec: DecoderSpec, module: Any) -> None:
        assert spec.module is not None
        self.spec = spec
        self._model, self._decoder, self._given = module, module.get_decoder(), _Given()
        place = next(name for name, part in module.named_modules() if part is self._decoder)
        module.set_submodule(place, self._given)  # set_decoder does nothing in many classes of 5.23
        self._attend: Attend | None = None  # of the step under way
        for call in spec.module.calls:
            self._decoder.get_submodule(call.module).__dict__["maitred"] = partial(self._attention, call)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, recur: Any = None) -> Tensor:
        """Returns hidden_TD after the final norm."""
        self._attend = attend
        out = self._decoder(input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False)
        self._given.kind = type(out)
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns float32 logits_TV."""
        self._given.hidden = hidden_TD[None]
        ids = torch.zeros(1, len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
        logits_TV: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        return logits_TV

    def _attention(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: None, scale: float, told: Any
    ) -> Any:
        assert self._attend is not None
        q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1) for x in (q, k, v))
        if scale != self.spec.attention_scale:
            q_TNH = q_TNH * (scale / self.spec.attention_scale)
        return self._attend(call.place, q_TNH, k_TKH, v_TKH, told.get("s_aux"), writes=call.writes)


class _Later(NamedTuple):
    """A tensor that is read when it is asked for, as transformers asks safetensors; what it gives outlives the file."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, _: Any) -> Any:
        return tensor_from_raw(self.checkpoint.tensor(self.name), self.name).clone()


def load_module(
    spec: DecoderSpec, checkpoint: Checkpoint, *, device: Any, dtype: torch.dtype, **_: Any
) -> ModuleDecoder:
    """Build the module and fill it from `checkpoint`. Raises CheckpointError where the two do not fit."""
    config, module_class = _config_and_class(checkpoint)
    names = [name for name in checkpoint.tensor_names() if not HARMLESS.search(name)]
    try:
        module, found = module_class.from_pretrained(
            None,
            config=config,
            state_dict={_own_name(name): _Later(checkpoint, name) for name in names},
            dtype=dtype,
            attn_implementation=SERVED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the weights do not fit {spec.architecture} ({_line(error)})") from error
    checkpoint.check_unchanged()
    for kind in ("missing", "mismatched", "unexpected"):
        if odd := sorted(map(str, found[f"{kind}_keys"])):
            raise CheckpointError(
                f"{len(odd)} tensors of {spec.architecture} are {kind}: {', '.join(odd[:4])}; config.json and the "
                f"weights may be of different models"
            )
    return ModuleDecoder(spec, module.to(device).requires_grad_(False))


def _own_name(name: str) -> str:
    """A tensor's name without the prefix that it has in a multimodal model."""
    prefix = next((each for each in PREFIXES[1:] if name.startswith(each)), None)
    return name.removeprefix("language_model.") if prefix is None else f"model.{name.removeprefix(prefix)}"
