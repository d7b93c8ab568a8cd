import json
from pathlib import Path

import pytest

from cdc_plugin.checkpoints.formats.solo_learn.args import (
    find_input_size,
    find_statistics,
    infer_settings,
    parse_args,
    resolve_references,
)
from cdc_plugin.checkpoints.read import read_run_args

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def nested(dataset="cifar10", **changes):
    args = {
        "name": "run",
        "method": "byol",
        "backbone": {"name": "resnet18", "kwargs": {}},
        "data": {"dataset": dataset, "train_path": "datasets", "format": "image_folder", "num_classes": 10},
        "augmentations": [{"crop_size": 32, "num_crops": 2}, {"crop_size": 24, "num_crops": 6}],
    }
    return args | changes


def flat(dataset="cifar10", **changes):
    args = {
        "dataset": dataset,
        "method": "simclr",
        "backbone": "resnet18",
        "backbone_args": {"cifar": dataset.startswith("cifar"), "zero_init_residual": False},
        "data_dir": "<not serializable>",
        "crop_size": [96, 96],
        "mean": [0.485, 0.456, 0.406],
        "std": [0.228, 0.224, 0.225],
        "num_classes": 10,
    }
    return args | changes


def linear(dataset="cifar10"):
    args = nested(dataset, pretrained_feature_extractor="x.ckpt", pretrain_method="mae")
    args["data"]["augmentations"] = {"crop_size": 224, "mean": "<not serializable>"}
    del args["augmentations"], args["method"]
    return args


def written(folder, args):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "run-ep=3.ckpt").write_bytes(b"weights, never opened here")
    return folder


@pytest.mark.parametrize("content", [None, [], {}, {"dataset": "cifar10"}, {"backbone": "resnet18"}, {"data": {}}])
def test_arguments_of_other_programs_are_not_taken_for_those_of_solo_learn(content):
    assert parse_args(content) is None


def test_nested_arguments_state_network_data_and_size_and_whether_they_are_of_cdcs_fork():
    run = parse_args(nested())
    assert (run.method, run.network, run.dataset, run.crop_size, run.fork) == ("byol", "resnet18", "cifar10", 32, False)
    assert find_input_size(run) == 32
    assert all(parse_args(args).fork for args in (nested(cluster_eval={}), nested(process_bar={}), nested("cifar20")))


@pytest.mark.parametrize(
    ("dataset", "mean", "std"),
    [
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
        ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ("cifar20", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ("stl10", (0.4914, 0.4823, 0.4466), (0.247, 0.243, 0.261)),
        ("imagenet100", IMAGENET_MEAN, IMAGENET_STD),
        ("tinyimagenet", IMAGENET_MEAN, IMAGENET_STD),
        ("custom", IMAGENET_MEAN, IMAGENET_STD),
    ],
)
def test_statistics_of_pretraining_follow_the_data_set(dataset, mean, std):
    assert find_statistics(parse_args(nested(dataset)), called_encoder=False) == (mean, std)


def test_statistics_of_the_first_view_count_for_custom_data_only():
    views = [{"crop_size": 64, "mean": 0.1}, {"crop_size": 64, "mean": [0.9, 0.9, 0.9]}]
    custom, known = (parse_args(nested(dataset, augmentations=views)) for dataset in ("custom", "cifar10"))
    assert find_statistics(custom, called_encoder=False) == ((0.1, 0.1, 0.1), IMAGENET_STD)
    assert find_statistics(known, called_encoder=False)[0] == (0.4914, 0.4822, 0.4465)
    assert find_statistics(parse_args(nested("cifar17")), called_encoder=False) is None  # nobody knows that one


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_linear_evaluation_has_statistics_and_sizes_of_its_own(dataset):
    run = parse_args(linear(dataset))
    assert (run.linear, run.method) == (True, "mae")
    assert find_statistics(run, called_encoder=False) == ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))
    assert find_input_size(run) == 32
    assert find_input_size(parse_args(linear("imagenet"))) == 224


def test_flat_arguments_of_imagenet_mean_the_old_deviation_unless_they_show_the_new_one():
    assert find_statistics(parse_args(flat("imagenet")), called_encoder=False)[1] == (0.228, 0.224, 0.225)
    newer = flat("imagenet", std=[0.229, 0.224, 0.225])
    assert find_statistics(parse_args(newer), called_encoder=False)[1] == IMAGENET_STD


def test_networks_called_encoder_saw_both_cifars_alike():
    run = parse_args(flat("cifar100"))
    assert find_statistics(run, called_encoder=True) == ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))
    assert find_statistics(run, called_encoder=False)[1] == (0.2673, 0.2564, 0.2762)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 96),
        ({"crop_size": None, "size": [64, 64]}, 32),  # 1.0.2 knew the size of CIFAR
        ({"crop_size": None, "size": [64, 64], "dataset": "custom"}, 64),
        ({"crop_size": None, "size": [64, 64], "dataset": "custom", "multicrop": True}, 224),
        ({"backbone_args": {"img_size": 48}}, 48),
    ],
)
def test_image_size_of_flat_arguments(changes, size):
    assert find_input_size(parse_args(flat(**changes))) == size


def test_linear_evaluations_before_1_0_6_do_not_name_their_network():
    args = flat(pretrained_feature_extractor="x.ckpt", backbone_args={"img_size": 32, "patch_size": 4})
    del args["backbone"], args["method"]
    run = parse_args(args)
    assert (run.linear, run.network, run.kwargs) == (True, None, {"img_size": 32, "patch_size": 4})


def test_small_windows_that_1_0_5_gave_to_swin_on_cifar_are_not_written_down():
    assert parse_args(flat(backbone="swin_tiny")).kwargs["window_size"] == 4


def test_references_are_followed_absolutely_relatively_and_inside_text():
    settings = {
        "data": {"dataset": "cifar10", "size": 32, "views": [{"size": "${..size}"}, {"size": "${data.views[0].size}"}]},
        "name": "byol-${data.dataset}-${data.size}",
        "again": "${name}",
        "node": "${data.views.1}",
        "beside": {"a": "${.b}", "b": 7},
    }
    found = resolve_references(settings)
    assert found["name"] == found["again"] == "byol-cifar10-32"
    assert found["data"]["views"][1] == found["node"] == {"size": None}  # one dot too few: the list has no size
    assert found["beside"]["a"] == 7
    assert resolve_references({"size": 32, "views": [{"size": "${...size}"}]})["views"][0]["size"] == 32


@pytest.mark.parametrize(
    "value", ["${nowhere}", "${oc.env:HOME}", "x-${now:%Y}", "${a}", "${b.a}", "<not serializable>", "${a${b}}", "${}"]
)
def test_what_cannot_be_resolved_is_none(value):
    assert resolve_references({"a": value, "b": {"a": "${a}"}})["a"] is None


def test_references_that_multiply_do_not_fill_the_memory():
    doubling = {f"a{level}": f"${{a{level + 1}}}${{a{level + 1}}}" for level in range(60)} | {"a60": "x" * 100}
    assert resolve_references(doubling)["a0"] is None
    nodes = {f"a{level}": {"x": f"${{a{level + 1}}}", "y": f"${{a{level + 1}}}"} for level in range(60)}
    assert str(resolve_references(nodes)).count("None") < 100_000
    assert resolve_references({f"a{level}": f"${{a{level + 1}}}" for level in range(5_000)})["a0"] is None


def test_no_function_of_omegaconf_is_called(monkeypatch):
    from omegaconf import OmegaConf

    def fail(*_arguments):
        pytest.fail("a function was called")

    OmegaConf.register_new_resolver("hostile", fail)
    monkeypatch.setenv("SECRET", "known")
    functions = ["${hostile:}", "${oc.env:SECRET}", "${${b}:SECRET}", "a ${oc.decode:${c}}", r"\\${hostile:}", "${d}"]
    settings = {"all": functions, "b": "oc.env", "c": "x", "d": "${hostile:}", "e": "${all}"}
    try:
        assert resolve_references(settings)["all"] == resolve_references(settings)["e"] == [None] * len(functions)
    finally:
        OmegaConf.clear_resolver("hostile")


def test_run_on_a_named_data_set_implies_data_root_and_clusters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project" / "datasets" / "cifar-100-python").mkdir(parents=True)
    (tmp_path / "datasets").mkdir()  # there, too, but without the data
    run = written(tmp_path / "project" / "trained_models" / "byol" / "x1", nested("cifar100"))
    expected = {"data": "cifar100", "data_root": str(tmp_path / "project" / "datasets"), "clusters": 100}
    assert infer_settings(*read_run_args(run)) == expected
    assert infer_settings(*read_run_args(run / "run-ep=3.ckpt")) == expected
    assert infer_settings(*read_run_args(run.parent)) == expected  # the folder above, if it holds one run alone
    monkeypatch.chdir(run)
    assert infer_settings(*read_run_args(".")) == expected
    monkeypatch.chdir(tmp_path / "datasets")
    assert read_run_args(".")[0] is None
    monkeypatch.chdir(tmp_path)
    gone = nested("stl10", data={"dataset": "stl10", "train_path": "gone"})
    assert infer_settings(*read_run_args(written(run, gone))) == {"data": "stl10", "clusters": 10}


def test_custom_run_implies_its_folder_and_the_classes_it_counted(tmp_path):
    args = nested("custom")
    args["data"] |= {"train_path": str(tmp_path / "images"), "num_classes": 3}
    run = written(tmp_path / "run", args)
    assert infer_settings(*read_run_args(run)) == {"clusters": 3}
    (tmp_path / "images").mkdir()
    assert infer_settings(*read_run_args(run)) == {"data": str(tmp_path / "images"), "clusters": 3}
    args["data"] |= {"no_labels": True, "num_classes": 1}
    assert infer_settings(*read_run_args(written(tmp_path / "run", args))) == {"data": str(tmp_path / "images")}
    args["data"]["format"] = "h5"
    assert infer_settings(*read_run_args(written(tmp_path / "run", args))) == {}


def test_images_of_this_machine_are_not_chosen_by_a_stranger(tmp_path, monkeypatch, caplog):
    private = tmp_path / "home" / "photos"
    private.mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    run = tmp_path / "home" / "downloads" / "run"
    for path in (str(private), "photos", "../../photos", "/", "~/photos"):
        args = nested("custom")
        args["data"] |= {"train_path": path, "num_classes": 3}
        assert infer_settings(*read_run_args(written(run, args))) == {"clusters": 3}
    assert "--data" in caplog.text
    args["data"]["train_path"] = "photos"
    monkeypatch.chdir(private.parent)  # who works there means it
    assert infer_settings(*read_run_args(written(run, args)))["data"] == str(private)


def test_own_settings_in_the_arguments_win_over_what_is_derived(tmp_path):
    own = {"clusters": "${data.num_classes}", "epochs": 3, "lr_heads": None, "augment": {"flip": False}}
    args = nested("cifar100", cdc=own | {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "input_size": 64})
    fields = infer_settings(*read_run_args(written(tmp_path, args)))
    assert fields == {"data": "cifar100", "clusters": 10, "epochs": 3, "augment": {"flip": False}}
    assert infer_settings(*read_run_args(written(tmp_path, nested(cdc="cifar10"))))["clusters"] == 10


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"dataset": 1}', "\x00", "[" * 100_000])
def test_foreign_folders_imply_nothing(tmp_path, content):
    (tmp_path / "args.json").write_text(content)
    assert infer_settings(*read_run_args(tmp_path)) == {}
    assert infer_settings(*read_run_args(tmp_path / "nothing" / "here.ckpt")) == {}
    assert infer_settings(*read_run_args("timm:resnet18")) == {}
