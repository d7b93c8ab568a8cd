"""Find the backbone inside a larger model's weights, and distinguish a network from its moving average."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.branches import take_branch
from cdc_plugin.checkpoints.formats._vit import rename_vit
from cdc_plugin.checkpoints.formats.base import Wanted
from cdc_plugin.checkpoints.formats.resnet_keys import rename_resnet
from cdc_plugin.checkpoints.formats.timm.index import names_like
from cdc_plugin.checkpoints.formats.torchvision import CANDIDATES, is_resnet
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.errors import CheckpointError, option

# Parts of a path that wrappers add and that say nothing: data-parallel, compiled, sharded.
WRAPPER_PARTS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What stands beside a backbone under no prefix of its own, and serves the pretraining only.
COMPANIONS = re.compile(
    r"(projection_head|prediction_head|projector|predictor|prototypes|decoder\w*|mask_token|masked_embed|patch_masking"
    r"|queue|queue_ptr|contrastive_head|criterion)(\.|$)"
)
AVERAGE_WORDS, STUDENT_WORDS = "momentum|teacher|target|ema|key|k|m", "student|online|query|anchor|q"
MOMENTUM = re.compile(rf"(^|[._])({AVERAGE_WORDS})([._]|$)")
STUDENT = re.compile(rf"(^|[._])({STUDENT_WORDS})([._]|$)")
ROLE = re.compile(f"{AVERAGE_WORDS}|{STUDENT_WORDS}|base")
DEEPEST, FEWEST = 5, 8


@dataclass(frozen=True)
class Inside:
    """A backbone inside a file, its weights under the names of torchvision or timm."""

    checkpoint: Checkpoint
    stem: dict[str, Any]  # facts of a ResNet's stem that the old names imply
    why: str  # why this branch, in words


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under names without the parts that data-parallel and compiled modules add."""
    plain = {".".join(p for p in key.split(".") if p not in WRAPPER_PARTS): value for key, value in state.items()}
    return plain if len(plain) == len(state) else dict(state)


def _is_wrapped(key: str) -> bool:
    return any(part in WRAPPER_PARTS for part in key.split("."))


def backbone_part(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the weights below a prefix without those of pretraining alone, a transformer's under timm's names."""
    return rename_vit({key: value for key, value in strip_prefix(state, prefix).items() if not COMPANIONS.match(key)})


def find_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes below which the names are those of a known network, outermost only.

    Their other branches are among them even if damaged: a lost teacher must not make way for its student unnoticed.
    """
    found: list[str] = []
    prefixes = _prefixes(state)
    for prefix in prefixes:
        part = {} if any(prefix.startswith(outer) for outer in found) else backbone_part(state, prefix)
        if CANDIDATES.keys() & part.keys() or is_resnet(rename_resnet(part)[0]) or names_like(part):
            found.append(prefix)
    roles = {_without_role(prefix) for prefix in found}
    others = [p for p in prefixes if p and not any(inner.startswith(p) for inner in found)]
    return found + [p for p in others if _without_role(p) in roles]


def choose_inside(checkpoint: Checkpoint, wanted: Wanted) -> Inside | None:
    """Return the backbone of the wanted branch, or of the one usually evaluated; None if no known network is there."""
    checkpoint, reason = take_branch(checkpoint, wanted.branch)
    state = without_wrappers(checkpoint.state)
    if state.keys() == checkpoint.state.keys() and any(_is_wrapped(key) for key in state):
        raise CheckpointError(
            f"{checkpoint.path} holds some weights twice, with and without the names of wrappers such as module.; "
            "save the state_dict of the one network to use"
        )
    prefixes = find_prefixes(state)
    if not prefixes:
        return None
    prefix, why = choose_prefix(state, prefixes, None if reason else wanted.branch, str(checkpoint.path))
    named, stem = rename_resnet(backbone_part(state, prefix))
    return Inside(replace(checkpoint, state=named), stem, reason or why)


def choose_prefix(state: Mapping[str, Tensor], prefixes: list[str], branch: str | None, source: str) -> tuple[str, str]:
    """Return the prefix of the wanted branch, and why it was chosen."""
    averages = [p for p in prefixes if MOMENTUM.search(p)]
    students = [p for p in prefixes if STUDENT.search(p) and p not in averages]
    plain = [p for p in prefixes if p not in averages and p not in students]
    if plain and students and not averages:
        averages, plain = plain, []  # whoever names a student means the other one as its average
    online = plain or students
    asked = " that is usually evaluated" if branch is None else ", as asked"
    if branch is None:
        # BYOL and MoCo evaluate the network they train, DINO and its kin the teacher.
        teaches = bool(averages) and (not online or any("student" in p or "anchor" in p for p in students))
        branch = "momentum" if teaches and not plain else "online"
    chosen = averages if branch == "momentum" else online
    if not chosen:
        raise CheckpointError(
            f"{source} has no {branch} branch; it holds {', '.join(prefixes) or 'one'}: "
            f"leave {option('branch', branch)} out"
        )
    first = strip_prefix(state, chosen[0])
    if not all(_same_weights(first, strip_prefix(state, other)) for other in chosen[1:]):
        raise CheckpointError(
            f"{source} holds {len(chosen)} backbones ({', '.join(chosen)}) and does not say which one to use; "
            "save the state_dict of the one to use"
        )
    if not averages or not online:
        return chosen[0], f"the only one, {chosen[0].rstrip('.') or 'at the top'}"
    kind = "moving average" if branch == "momentum" else "trained network"
    return chosen[0], f"{chosen[0].rstrip('.')}, the {kind}{asked}"


def _without_role(prefix: str) -> str:
    """Return a prefix without the words that mark a network or its average: ``encoder`` for ``encoder_k``."""
    return "_".join(word for word in re.split("[._]", prefix) if word and not ROLE.fullmatch(word))


def _prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return every prefix of at most five parts with enough names below it, short ones first."""
    counts = Counter({"": len(state)})
    for key in state:
        parts = key.split(".")
        counts.update(".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), DEEPEST + 1)))
    return sorted((p for p, count in counts.items() if count >= FEWEST), key=lambda p: p.count("."))


def _same_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
