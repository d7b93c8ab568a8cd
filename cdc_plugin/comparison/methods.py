"""Name the methods to compare: CDC, each of its parts exchanged, and its opponents.

A method is a training (`comparison.train`) and settings. ``cdc:mini_clusters=40:batch_size=500`` adds settings;
``scan2+cdc`` is CDC as a second stage after an opponent.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.losses import check_calibration
from cdc_plugin.core.selection import check_selection
from cdc_plugin.errors import ConfigError

OURS, SELECTION, CALIBRATION, PARTS = "CDC", "selection", "calibration", "initialisation and heads"
OPPONENTS, REFERENCE, RETROFIT = "opponents", "reference, uses labels", "retrofit"


@dataclass(frozen=True)
class Method:
    """One row of a table, or two."""

    name: str
    summary: str
    group: str
    training: str  # name in `comparison.train.TRAININGS`
    rows: tuple[str, ...]  # names, one for each head that is reported; a single one is the head that predicts
    settings: tuple[str, ...] = ()  # ``key=value`` of `RefineConfig`, with shares as `replace_shares` reads them
    after: str | None = None  # the method whose model this one continues
    uses_labels: bool = False  # for training or fitting, and thus for reference only


def _cdc(group: str, name: str, row: str, settings: str, summary: str) -> Method:
    return Method(name, summary, group, "cdc", (row,), tuple(settings.split()))


def _opponent(name: str, row: str, summary: str, after: str | None = None) -> Method:
    return Method(name, summary, OPPONENTS, name, (row,), after=after)


def _reference(name: str, row: str, summary: str, after: str | None = None) -> Method:
    return Method(name, summary, REFERENCE, name, (row,), after=after, uses_labels=True)


def _fixed(threshold: str) -> Method:
    settings, summary = f"selection=fixed threshold={threshold}", f"CDC that trusts predictions above {threshold}"
    return _cdc(SELECTION, f"fixed-{threshold}", f"fixed threshold {threshold}", settings, summary)


METHODS = {
    method.name: method
    for method in [
        _opponent("kmeans", "k-means", "k-means on the features of the backbone; states no confidence"),
        _opponent("cc", "CC", "contrastive clustering: instance and cluster head on two strong views"),
        _opponent("secu", "SeCu", "cluster discrimination by cosine centres, with the entropy constraint"),
        _opponent("secu-size", "SeCu-Size", "the same with a minimum size for every cluster"),
        _opponent("scan2", "SCAN-2", "nearest neighbours belong to one cluster"),
        _opponent("scan3", "SCAN-3", "SCAN-2, then self-labelling of predictions above 0.99", after="scan2"),
        _opponent("spice", "SPICE-2", "pseudo-labels around prototypes, double softmax, frozen backbone"),
        _opponent("temi", "TEMI", "information of neighbours, instance weights, 16 heads, frozen backbone"),
        _opponent("turtle", "TURTLE", "labels that linear classifiers learn best, frozen backbone"),
        _opponent("dcboost", "DCBoost", "features shaped by images that agree with all neighbours; no confidence"),
        _opponent("gmm", "Gaussian mixture", "diagonal covariances, on the features of the backbone"),
        _opponent("spectral", "spectral clustering", "of the graph of nearest neighbours; states no confidence"),
        _opponent("hdbscan", "HDBSCAN", "finds the number of clusters itself, noise is one more; no confidence"),
        _opponent("old", "old model", "the clustering head in the checkpoint, unchanged"),
        Method("cdc", "CDC, both heads", OURS, "cdc", ("CDC-Clu", "CDC-Cal")),
        _cdc(PARTS, "start-random", "after random init.", "epochs=0 init=random", "random heads, untrained"),
        _cdc(PARTS, "start", "after prototype init.", "epochs=0 init=prototypes", "prototype heads, untrained"),
        _cdc(PARTS, "random-init", "w/o init. + CDC", "init=random", "CDC that starts from random heads"),
        _cdc(PARTS, "single-head", "single head (Clu)", "heads=clu", "one head that selects for itself"),
        _cdc(PARTS, "single-head-both", "single head (Clu+Cal)", "heads=clu+cal", "one head with both losses"),
        _cdc(PARTS, "no-stop-gradient", "w/o stop gradient", "stop_gradient=false", "calibration moves the backbone"),
        *(_fixed(threshold) for threshold in ("0.99", "0.95", "0.90", "0.80")),
        _cdc(SELECTION, "flexmatch", "FlexMatch", "heads=clu selection=flexmatch", "its thresholds, on a single head"),
        _cdc(SELECTION, "freematch", "FreeMatch", "heads=clu selection=freematch", "its thresholds, on a single head"),
        _cdc(SELECTION, "cdc+flexmatch", "CDC + FlexMatch", "selection=flexmatch", "CDC with its thresholds"),
        _cdc(SELECTION, "cdc+freematch", "CDC + FreeMatch", "selection=freematch", "CDC with its thresholds"),
        _cdc(SELECTION, "cdc+gsf", "CDC + GSF", "selection=confident+gsf", "CDC and more images, of similar gradient"),
        _cdc(SELECTION, "cdc+ppf", "CDC + PPF", "selection=confident+ppf", "CDC and more images, near prototypes"),
        _cdc(CALIBRATION, "label-smoothing", "label smoothing", "calibration=label-smoothing", "in place of regions"),
        _cdc(CALIBRATION, "focal", "focal loss", "calibration=focal", "in place of regions"),
        _cdc(CALIBRATION, "l1", "L1 norm", "calibration=l1", "of the logits, in place of regions"),
        _cdc(CALIBRATION, "no-calibration", "no calibration", "calibration=none", "second head without a penalty"),
        Method(
            "pseudocal",
            "of the single head after training, on mixtures of images",
            CALIBRATION,
            "pseudocal",
            ("PseudoCal",),
            after="single-head",
        ),
        _reference("temperature", "temperature scaling", "of the single head, on labelled images", "single-head"),
        _reference("linear", "linear classifier", "on the frozen features, trained on labels"),
        _reference("supervised", "supervised", "backbone and classifier, trained on labels"),
    ]
}
# The names of selections and calibrations in a config mean CDC with them.
ALIASES = {
    "confident": "cdc",
    "mini-clusters": "cdc",
    "fixed": "fixed-0.95",
    "gsf": "cdc+gsf",
    "ppf": "cdc+ppf",
    "none": "no-calibration",
    "k-means": "kmeans",
    "scan": "scan2",
}
# Opponents without a head that CDC could continue.
HEADLESS = {"kmeans", "dcboost", "gmm", "spectral", "hdbscan", "old"}
# Settings in which methods must not differ.
COMMON = {"backbone", "format", "arch", "data", "clusters", "labels", "out", "track", "seed", "device", "augment"}
COMMON |= {"input_size", "mean", "std", "frozen_views"}
SYMBOLS = {"batch_size": "B", "mini_clusters": "K", "hidden": "H", "entropy_weight": "w_en"}


def find_method(name: str) -> Method:
    """Return a method by name: plain, with settings (``cdc:hidden=256``), or CDC after another (``scan2+cdc``).

    >>> find_method("scan2+cdc").after
    'scan2'
    >>> find_method("cdc:hidden=256").settings
    ('hidden=256',)
    """
    base, *words = name.strip().split(":")
    method = _find_plain_method(base)
    if not words:
        return method
    for word in words:
        if "=" not in word:
            raise ConfigError(
                f"method {name!r}: expected key=value after a colon, as in cdc:hidden=256; found {word!r}"
            )
        key = word.split("=")[0]
        if key.split(".")[0] in COMMON:
            raise ConfigError(f"method {name!r}: {key} is the same for all methods; pass {word} for all of them")
    check_settings(words)
    pairs = [word.split("=", 1) for word in words]
    row = ", ".join([method.rows[-1], *(f"{SYMBOLS.get(key, key)} {value}" for key, value in pairs)])
    return replace(method, name=name.strip(), rows=(row,), settings=(*method.settings, *words))


def check_settings(words: list[str]) -> None:
    """Refuse settings that no cell could use, before the grid starts."""
    config: RefineConfig = load_config(overrides=replace_shares(words, batch=1000, mini_clusters=100))
    check_selection(config.selection)
    check_calibration(config.calibration, config.calibration_strength)


def replace_shares(words: Sequence[str], batch: int, mini_clusters: int) -> list[str]:
    """Return settings with numbers instead of shares: B of the default ``batch``, K of the resulting B or of its own.

    >>> replace_shares(["batch_size=50%", "mini_clusters=10%"], 1000, 40)
    ['batch_size=500', 'mini_clusters=50']
    >>> replace_shares(["batch_size=50%", "mini_clusters=120%K"], 1000, 40)
    ['batch_size=500', 'mini_clusters=48']
    """
    settings = dict(word.split("=", 1) for word in words)
    for key in ("batch_size", "mini_clusters"):
        value = settings.get(key, "")
        of_recipe = key == "mini_clusters" and value.endswith("%K")
        if of_recipe and not mini_clusters:
            raise ConfigError(f"{key}={value} is a share of the recipe's K, but none is stated; take one of B, as 10%")
        if of_recipe or value.endswith("%"):
            try:
                share = float(value.rstrip("%K")) / 100
            except ValueError:
                raise ConfigError(f"{key}={value}: expected a number before the %, as in {key}=50%") from None
            settings[key] = str(max(1, round(share * (mini_clusters if of_recipe else batch))))
        if key == "batch_size" and settings.get(key, "").isdigit():
            batch = int(settings[key])
    return [f"{key}={value}" for key, value in settings.items()]


def _find_plain_method(name: str) -> Method:
    name = ALIASES.get(name, name)
    if name in METHODS:
        return METHODS[name]
    first = name.removesuffix("+cdc")
    earlier = METHODS.get(ALIASES.get(first, first))
    if name.endswith("+cdc") and earlier is not None and earlier.group == OPPONENTS and earlier.name not in HEADLESS:
        summary = f"{earlier.rows[0]}, then CDC from its head"
        return Method(name, summary, RETROFIT, "cdc", (f"{earlier.rows[0]} + CDC",), ("init=keep",), earlier.name)
    near = difflib.get_close_matches(name, [*METHODS, *ALIASES], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"no method {name!r}: {hint}cdc-compare --list-methods shows all")
