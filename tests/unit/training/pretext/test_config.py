import pytest

from cdc_plugin.config.load import load_config, to_yaml
from cdc_plugin.config.recipes import find_recipe, read_recipe, recipe_names
from cdc_plugin.errors import UserError
from cdc_plugin.training.pretext.config import TITLES, PretrainConfig, default_recipe, load_pretrain_config, resolve

EMA_AND_QUEUE = {"mocov2": (0.99, 32_768), "byol": (0.996, None), "simsiam": (None, None)}


@pytest.mark.parametrize("method", TITLES)
def test_the_values_of_the_paper(method):
    config = load_pretrain_config(f"paper-{method}")
    assert (config.method, config.arch, config.hidden, config.projection) == (method, "resnet34", 4096, 256)
    assert (config.epochs, config.warmup_epochs, config.batch_size, config.lr) == (1000, 50, 256, 0.5)
    assert (config.weight_decay, config.temperature) == (pytest.approx(1e-4), 0.2)
    assert config.optimizer == ("lars" if method == "byol" else "sgd")
    resolved = resolve(config, 60_000, 32)
    assert (resolved.ema, resolved.queue) == EMA_AND_QUEUE[method]
    assert (resolved.flip, resolved.blur) == (True, [0, 0])  # not on CIFAR
    # The released code: BYOL's two views differ, MoCo-v2's loss has both sides.
    assert resolve(config, 13_000, 96).blur == ([1, 0.1] if method == "byol" else [0.5, 0.5])
    assert (config.solarize, config.jitter[2]) == ((0.2, 0.2) if method == "byol" else (0, 0.4))
    assert config.symmetric


def test_there_is_a_recipe_of_each_size_for_each_method_and_one_for_the_demo():
    sizes = [f"{size}-{method}" for size in ("laptop", "paper") for method in TITLES]
    assert recipe_names("pretrain") == sorted([*sizes, "demo"])
    assert default_recipe("byol", 49_999) == "laptop-byol"
    assert default_recipe("mocov2", 50_000) == "paper-mocov2"


@pytest.mark.parametrize("name", recipe_names("pretrain"))
def test_every_recipe_that_is_asked_for_stands_alone_and_can_be_resolved(name):
    assert load_pretrain_config(name, None, (), lambda config: pytest.fail("not needed")) == load_pretrain_config(name)
    config = resolve(load_pretrain_config(name, {"data": "photos"}), 3_000, 64)
    unused = {"mocov2": {"predictor"}, "simsiam": {"queue", "ema", "ema_end"}, "byol": {"queue"}}[config.method]
    unknown = {key for key, value in vars(config).items() if value is None}
    # Mean and std are measured, the rest is the user's.
    assert unknown - {"mean", "std", "data_root", "out"} == unused
    assert config.queue is None or config.queue < 3_000


def test_queues_and_warm_up_are_cut_to_the_run_and_digits_are_not_mirrored_unless_asked_for():
    for images, queue in ((32_769, 32_768), (32_768, 16_384), (13_000, 6_500)):
        assert resolve(load_pretrain_config("paper-mocov2"), images, 32).queue == queue
    for epochs, warmup in ((8, 2), (1, 0)):
        assert resolve(load_pretrain_config("paper-simsiam", {"epochs": epochs}), 1000, 32).warmup_epochs == warmup
    for words, flip in (([], False), (["flip=true"], True)):
        assert resolve(load_pretrain_config(None, {"data": "digits"}, words), 1797, 32).flip is flip
    with pytest.raises(UserError, match="at least 32"):
        resolve(load_pretrain_config(None, {"data": "photos"}), 31, 32)


def test_words_overrule_flags_and_flags_a_file_and_a_file_what_lies_beneath(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("method: byol\nepochs: 7\nlr: 0.3\nseed: 4\n")
    config = load_pretrain_config(
        file, {"epochs": 8, "seed": 5}, ["seed=6"], lambda config: read_recipe(find_recipe("laptop-byol", "pretrain"))
    )
    assert (config.lr, config.epochs, config.seed, config.arch) == (0.3, 8, 6, "small")


def test_resolved_settings_are_read_back_as_they_were(tmp_path):
    given = {"data": "digits", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    config = resolve(load_pretrain_config("laptop-mocov2", given), 1797, 32)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert vars(load_config(tmp_path / "config.yaml", schema=PretrainConfig)) == vars(config)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("paper-moco", [], "did you mean 'paper-mocov2'"),
        (None, ["epoch=3"], "did you mean epochs"),
        (None, ["epochs"], "expected key=value"),
        (None, ["method=mocov3"], "did you mean mocov2"),
        (None, ["epochs=0"], "epochs.* at least 1"),
        (None, ["batch_size=2"], "batch_size.* at least 8"),
        (None, ["ema=1.5"], "ema must be .* at most 1"),
        (None, ["lr=fast"], "lr"),
        (None, ["optimizer=adam"], "sgd, lars"),
        ("paper-byol", ["method=simsiam"], "recipe='paper-simsiam'"),
    ],
)
def test_mistakes_are_refused_with_what_to_type_next(recipe, words, message):
    with pytest.raises(UserError, match=message) as raised:
        load_pretrain_config(recipe, None, words)
    assert "\n" not in str(raised.value)
