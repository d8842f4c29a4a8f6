"""The role of a parameter in a model, from the module that holds it, from names, and from what the model says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from parbank.errors import ConfigError

HEAD_NAMES = frozenset({
    "lm_head", "head", "output_head", "embed_out", "unembed", "unembedding", "classifier", "score", "logits", "output",
    "qa_outputs",
})  # fmt: skip
SECOND_HEADS = frozenset(["aux_head", "head_dist"])
"""Heads of vision models beside the one that they declare."""
HEAD_MODULES = frozenset(["classifier", "classification_head"])
"""Modules whose last Linear is the head."""
ROUTER_NAMES = frozenset(["router", "gating"])
GATE_NAMES = frozenset(["gate", "gates", *ROUTER_NAMES])
MATRIX_NAMES = frozenset(["weight", "kernel", "bank", "banks"])
TABLE_NAMES = frozenset({
    "log", "pos", "position", "positions", "positional", "token", "tokens", "latent", "latents", "prompt", "prompts",
    "scale", "scales", "decay", "mix", "bias", "biases",
})  # fmt: skip
"""Words in the names of bare parameters that are looked up, added or multiplied number by number: `A_log`, `rel_pos_h`."""
SMALL_SIDE = 64  # a gate or router has a few outputs; a hidden matrix this thin is not worth orthogonalising

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PACKED = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.modules.conv._ConvTransposeNd)
"""Modules that pack several maps into one weight, or store it in another order."""


@dataclass(eq=False)
class Found:
    """One parameter, every module that holds it, and all its names."""

    param: Tensor
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    parents: list[nn.Module | None] = field(default_factory=list)
    """Per owner: the module that holds it."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def words(self) -> list[str]:
        """The parts of the name, without a final `weight`."""
        parts = self.name.lower().split(".")
        return parts[:-1] if parts[-1] == "weight" and len(parts) > 1 else parts


def is_vector(param: Tensor) -> bool:
    """One number per channel, however many dimensions the tensor has."""
    return param.ndim < 2 or param.numel() == max(param.shape)


def find_declared(model: nn.Module) -> dict[int, str]:
    """Embeddings and heads that models of transformers and timm name themselves, by the id of the parameter."""
    methods = {"get_input_embeddings": "embedding", "get_output_embeddings": "head", "get_classifier": "head"}
    found: dict[int, str] = {}
    for module in model.modules():
        for method, role in methods.items():
            if callable(getattr(module, method, None)):
                try:
                    declared = getattr(module, method)()
                except (NotImplementedError, AttributeError, TypeError):  # a model without such a layer
                    continue
                for layer in declared if isinstance(declared, tuple) else [declared]:
                    weights = layer.parameters() if isinstance(layer, nn.Module) else ()
                    for param in weights:
                        if not is_vector(param):
                            found.setdefault(id(param), role)
    return found


def find_heads(found: list[Found], declared: Mapping[int, str]) -> list[Found]:
    """Output layers: as declared, by name, by having one output per token, or as the only Linear after convolutions."""
    linears = [item for item in found if _is_linear(item)]
    if any(isinstance(owner, nn.Embedding) for item in linears for owner in item.owners):
        return []  # the head is tied to an embedding
    words = [item.words[-1] for item in linears]
    heads = [item for item in linears if declared.get(id(item.param)) == "head"]
    if heads:
        return heads + [item for item, word in zip(linears, words) if word in SECOND_HEADS]
    heads = [item for item, word in zip(linears, words) if word in HEAD_NAMES and words.count(word) == 1]
    heads += [item for item in linears if HEAD_MODULES & set(item.words[-2:-1])][-1:]
    if heads:
        return heads
    if len(linears) == 1 and any(isinstance(owner, CONVOLUTIONS) for item in found for owner in item.owners):
        return linears
    tokens = _find_vocabularies(found)
    fitting = [i for i in linears if i.param.shape[0] in tokens and not _is_square(i) and not _is_repeated(i, linears)]
    return [item for item in fitting if _is_beside(item, fitting[-1])]


def _find_vocabularies(found: list[Found]) -> set[int]:
    """The sizes of embeddings that are no tables of positions."""
    tables = [(item, owner) for item in found for owner in item.owners if isinstance(owner, nn.Embedding)]
    return {owner.num_embeddings for item, owner in tables if not _counts_positions(item)}


def _is_square(item: Found) -> bool:
    return item.param.shape[0] == item.param.shape[1]


def _is_repeated(item: Found, linears: list[Found]) -> bool:
    """Whether a Linear of this name is in several modules, as in each layer. Members of one list count as one."""

    def name(of: Found) -> str:
        return next((word for word in reversed(of.words) if not word.isdigit()), of.words[-1])

    return len({id(other.parents[0]) for other in linears if name(other) == name(item)}) > 1


def _is_beside(item: Found, head: Found) -> bool:
    """Whether a Linear is a head like another one: both take the same input, as heads for several tokens do. Square ones, and
    those of a Sequential, may follow each other."""
    parallel = item.param.shape == head.param.shape and item.parents[0] is head.parents[0] and not _is_square(item)
    return item is head or (parallel and not isinstance(head.parents[0], nn.Sequential))


def _is_linear(item: Found) -> bool:
    return item.param.ndim == 2 and any(isinstance(owner, nn.Linear) for owner in item.owners)


def _counts_positions(item: Found) -> bool:
    """Whether an embedding is a table of positions or of token types, whose size is no vocabulary's."""
    return any(part in item.words[-1] for part in ("pos", "wpe", "type", "segment", "time"))


def find_role(item: Found) -> str:
    """matrix, flattened, transposed, triple, embedding, packed or small; or, after a question mark, why it is unclear."""
    param, owner = item.param, item.owners[0]
    if any(isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in item.owners):
        return "embedding"  # also a head that is tied to it
    if is_vector(param) or "norm" in type(owner).__name__.lower() or item.names[0].endswith("bias"):
        return "small"
    if any("embed" in word or word in ("wte", "wpe") for word in item.words[-2:]):
        return "embedding"
    return _role_of_gate(item) or role_of_module(item)


def _role_of_gate(item: Found) -> str | None:
    """Routers and gates with few outputs are small. A gate with an output for each input is a hidden matrix."""
    param, last = item.param, item.words[-1]
    if "router" in type(item.owners[0]).__name__.lower() or ROUTER_NAMES & set(item.words[-2:]):
        return "small"
    if not set(last.split("_")) & GATE_NAMES or last.endswith(("proj", "weight")):
        return None
    if param.ndim != 2 or param.shape[0] < SMALL_SIDE or hasattr(item.parents[0], "experts"):
        return "small"
    return None if param.shape[0] >= param.shape[1] else "?named a gate, but as large as a hidden matrix"


def role_of_module(item: Found) -> str:
    """The role that the module gives to its parameter."""
    param, owner = item.param, item.owners[0]
    final = item.name.split(".")[-1].lower()
    made = hasattr(owner, final.removesuffix("_v") + "_g") or hasattr(owner, final.removesuffix("_orig") + "_u")
    if isinstance(owner, PACKED) or "parametrizations" in item.words or made:
        return "packed"  # the last two: the weight is a function of the parameter (weight_norm, spectral_norm)
    if isinstance(owner, CONVOLUTIONS):
        return "small" if param.shape[1] == 1 else "flattened"  # depthwise: filters
    if isinstance(owner, nn.Linear):
        return "matrix"
    if isinstance(owner, nn.MultiheadAttention):
        return "triple" if item.name.endswith("in_proj_weight") else "matrix"
    if type(owner).__name__ == "Conv1D" and param.ndim == 2:  # GPT-2's linear layer in transformers: (in, out)
        return "transposed"
    if set(final.split("_")) & TABLE_NAMES:
        return "packed"
    if param.ndim == 3 and min(param.shape[1:]) > 1:
        if param.shape[0] > max(
            param.shape[1:]
        ):  # no stack of matrices: XLNet's (inputs, heads, channels), for instance
            return "packed"
        return "transposed" if _stores_inputs_first(item) else "matrix"
    if param.ndim == 2 and (final in MATRIX_NAMES or final.endswith(("_weight", "_proj", "_bank"))):
        return "matrix"
    return f"?a bare parameter of {type(owner).__name__}"


def _stores_inputs_first(item: Found) -> bool:
    """Whether experts are stored as (N, in, out): by the module's own flag, or because the first stack's inputs are the
    outputs of the next one of another shape. Where that holds both ways, the router's inputs are the first stack's."""
    owner, count = item.owners[0], item.param.shape[0]
    flag = getattr(owner, "is_transposed", None)
    if flag is not None:
        return bool(flag)
    stacks = [p for p in owner.parameters(recurse=False) if p.ndim == 3 and p.shape[0] == count]
    others = [p for p in stacks if p.shape != stacks[0].shape]
    if not others:
        return False
    (_, a, b), (_, c, d) = stacks[0].shape, others[0].shape
    if (a, b) != (d, c):
        return a == d and b != c
    around = item.parents[0] or owner
    widths = [p.shape[1] for p in around.parameters() if p.ndim == 2 and p.shape[0] == count and p.shape[1] in (a, b)]
    return bool(widths) and widths[0] == a


def check_flattened(found: list[Found]) -> None:
    """Refuses weights that a wrapper has flattened: without their shape, all would go to AdamW."""
    for item in found:
        flat = item.name.endswith("_flat_param")
        if flat or (isinstance(item.owners[0], nn.Linear) and item.name.endswith("weight") and item.param.ndim != 2):
            raise ConfigError(
                f"{item.name} has shape {tuple(item.param.shape)}: FSDP1 and DeepSpeed's ZeRO-3 flatten weights, and Muon needs "
                "matrices. Use FSDP2 (torch.distributed.fsdp.fully_shard)"
            )


def check_last_linear(found: list[Found], roles: Mapping[str, str], chosen: Mapping[str, str]) -> None:
    """A model without a known head may still end in one: the last Linears, if no other has their shape, are ambiguous."""
    linears = [item for item in found if isinstance(item.owners[0], nn.Linear) and roles[item.name] != "small"]
    unclear, reason = _find_unclear(found, linears, roles)
    unclear = [i for i in unclear if i.param.requires_grad and roles[i.name] == "matrix" and i.name not in chosen]
    if unclear:
        names = ", ".join(f"{item.name} {tuple(item.param.shape)}" for item in unclear)
        overrides = ", ".join(f'"{item.name}": "adamw"' for item in unclear)
        raise ConfigError(
            f"{names}: the last Linear, {reason}. It may be the output layer (adamw) or a hidden matrix (muon). Say so: "
            f"split_parameters(model, overrides={{{overrides}}})"
        )


def _find_unclear(found: list[Found], linears: list[Found], roles: Mapping[str, str]) -> tuple[list[Found], str]:
    """Linears that may be heads, and what speaks for it."""
    if not linears:
        return [], ""
    last, known = linears[-1], {id(item) for item in found if roles[item.name] in ("head", "other")}
    tail = [item for item in linears if _is_beside(item, last)]
    if known:
        return (tail, "beside a head") if any(id(item) in known for item in tail) else ([], "")
    if any(len(item.names) > 1 for item in found):  # a tied weight: the head is an embedding
        return [], ""
    if _is_square(last) and last.param.shape[0] in _find_vocabularies(found) and not _is_repeated(last, linears):
        return [last], "with one output per token"
    alike = [item for item in linears if item.param.shape == last.param.shape]
    return (tail, "and no other has its shape") if len(alike) == len(tail) else ([], "")
