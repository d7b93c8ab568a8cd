"""One module per framework; this table lists all formats in the order in which a checkpoint is compared with them.

Unmistakable marks come before mere plausibility: our own files, what frameworks write around a network, networks
inside unknown files, and last the bare weights of a network. To add a format, write its ``matches`` and ``load`` and
give it a line here; other packages add theirs through the entry point group ``cdc_plugin.checkpoint_format``, and
those are asked first.
"""

from cdc_plugin.checkpoints.formats import (
    cc,
    cdc,
    clip,
    divclust,
    lightly,
    lightly_train,
    native,
    propos,
    scan,
    secu,
    solo_learn,
    spice,
    temi,
    timm,
    torchvision,
    transformers,
    turtle,
)
from cdc_plugin.checkpoints.formats.base import CheckpointFormat
from cdc_plugin.core.registry import Registry

formats: Registry[CheckpointFormat] = Registry(
    "checkpoint format",
    {
        "native": CheckpointFormat(native.matches, native.load_native),
        "cdc": CheckpointFormat(cdc.matches, cdc.load_cdc),
        "solo-learn": CheckpointFormat(solo_learn.matches, solo_learn.load_solo_learn),
        "scan": CheckpointFormat(scan.matches, scan.load_scan),
        "secu": CheckpointFormat(secu.matches, secu.load_secu),
        "cc": CheckpointFormat(cc.matches_cc, cc.load_cc),
        "tcl": CheckpointFormat(cc.matches_tcl, cc.load_tcl),
        "divclust": CheckpointFormat(divclust.matches, divclust.load_divclust),
        "propos": CheckpointFormat(propos.matches, propos.load_propos),
        "spice-self": CheckpointFormat(spice.matches_self, spice.load_self),
        "spice-semi": CheckpointFormat(spice.matches_semi, spice.load_semi),
        "moco": CheckpointFormat(spice.matches_moco, spice.load_moco),
        "temi": CheckpointFormat(temi.matches, temi.load_temi),
        "turtle": CheckpointFormat(turtle.matches, turtle.load_turtle),
        "transformers": CheckpointFormat(transformers.matches, transformers.load_transformers),
        "clip": CheckpointFormat(clip.matches, clip.load_clip),
        "lightly-train": CheckpointFormat(lightly_train.matches, lightly_train.load_lightly_train),
        "lightly": CheckpointFormat(lightly.matches_lightly, lightly.load_lightly),
        "generic": CheckpointFormat(lightly.matches_generic, lightly.load_generic),
        "timm": timm.TIMM,
        "torchvision": torchvision.TORCHVISION,
    },
)
