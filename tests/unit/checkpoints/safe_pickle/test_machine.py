"""What pickles may name, and that nothing they name is ever run."""

import argparse
import collections
import copyreg
import datetime
import enum
import functools
import io
import pathlib
import pickle
import struct
import types

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from cdc_plugin.checkpoints.read import payload_fields, plain
from cdc_plugin.checkpoints.safe_pickle import machine as unpickle
from cdc_plugin.checkpoints.safe_pickle.machine import PickleMachine, Refused
from cdc_plugin.checkpoints.safe_pickle.names import ForeignName, InertRecord, is_allowed

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Colour(enum.Enum):
    RED = 1


class Settings(dict):
    """As Lightning's AttributeDict or EasyDict: a dict with attributes."""


class SlottedSettings:
    __slots__ = ("size",)


Point = collections.namedtuple("Point", "x y")


def read(content):
    return PickleMachine(io.BytesIO(content)).load()


def read_back(value, protocol):
    return read(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "posix.system", "nt.system", "os.popen", "subprocess.Popen", "subprocess.check_output"),
        *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.open", "builtins.__import__"),
        *("__builtin__.eval", "__builtin__.apply", "commands.getoutput", "builtins.map"),
        *("importlib.import_module", "runpy._run_code", "ctypes.CDLL", "pty.spawn", "webbrowser.open", "sys.exit"),
        *("pip.main", "pip._internal.main", "shutil.rmtree", "socket.socket", "pickle.loads", "_pickle.loads"),
        *("types.FunctionType", "types.CodeType", "operator.attrgetter", "functools.reduce", "code.interact"),
        *("torch.hub.load", "torch.jit.load", "torch.load", "torch.storage._load_from_bytes", "torch.package.Foo"),
        *("torch.fx.graph_module.reduce_graph_module", "torch.utils.cpp_extension.load", "torch.os.system"),
        *("numpy.load", "numpy.testing._private.utils.runstring", "numpy.f2py.compile", "numpy.os.system"),
        *("pathlib.os.system", "collections._sys.exit", "timm.layers.os.system", "omegaconf.sys.exit"),
        *("someone.run", "__main__.train", "cloudpickle.cloudpickle._make_function", "dill._dill._load_type"),
        *("someone.os.system", "someone.a b", "collections.namedtuple", "Config.run", "__main__.Config.run"),
    ],
)
def test_names_that_no_checkpoint_needs_are_refused(name):
    module, _, last = name.rpartition(".")
    assert not is_allowed(module, last)
    package, _, rest = name.partition(".")
    assert not is_allowed(package, rest), "as an attribute of the package"


@pytest.mark.parametrize(
    "name",
    [
        *("solo.methods.base.static_lr", "solo.utils.lr_scheduler.LinearWarmupCosineAnnealingLR", "typing.Any"),
        *("omegaconf.dictconfig.DictConfig", "omegaconf.base.ContainerMetadata", "argparse.Namespace"),
        *("torch.optim.sgd.SGD", "torch.optim.lr_scheduler.CosineAnnealingLR", "torch.FloatStorage"),
        *("torch.float8_e5m2", "yacs.config.CfgNode", "easydict.EasyDict", "addict.addict.Dict", "munch.Munch"),
        *("torch.distributed.fsdp.api.ShardingStrategy", "torch.nn.functional.relu", "torch.bfloat16", "torch.Size"),
        *("pytorch_lightning.utilities.parsing.AttributeDict", "lightning.fabric.utilities.data.AttributeDict"),
        *("lightly.loss.ntx_ent_loss.NTXentLoss", "lightly_train._methods.dino.DINOArgs", "timm.layers.drop.DropPath"),
        *("mmengine.config.ConfigDict", "ml_collections.config_dict.config_dict.ConfigDict"),
        *("__main__.Config", "someone.conf.TrainConfig"),
        *("numpy.float64", "numpy.dtype", "numpy.core.multiarray.scalar", "numpy.random._pickle.__randomstate_ctor"),
        *("__builtin__.long", "copy_reg._reconstructor", "builtins.frozenset", "pathlib._local.PosixPath"),
    ],
)
def test_names_that_training_scripts_leave_are_allowed(name):
    module, _, last = name.rpartition(".")
    assert is_allowed(module, last)


def hostile_pickles(command):
    """``os.system(command)`` in every way that the pickle language has of saying it."""
    text = command.encode()
    short = bytes([len(text)]) + text
    yield "reduce", b"cos\nsystem\n(S'" + text + b"'\ntR."
    yield "instance", b"(S'" + text + b"'\nios\nsystem\n."
    yield "object", b"(cos\nsystem\nS'" + text + b"'\no."
    yield "new object", b"\x80\x02cposix\nsystem\n\x8c" + short + b"\x85\x81."
    yield "stack", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + short + b"\x85R."
    yield "memo", b"\x80\x04\x8c\x06system\x94\x8c\x02os\x940h\x01h\x00\x93\x8c" + short + b"\x85R."
    yield "memo in text", b"S'system'\np7\n0S'os'\np9\n0g9\ng7\n\x93(S'" + text + b"'\ntR."
    yield "duplicate and pop", b"\x80\x04\x8c\x02os2\x8c\x06system\x93\x8c" + short + b"\x85R0."
    yield "in a list of a dict", b"\x80\x02}X\x01\x00\x00\x00a](cos\nsystem\n\x8c" + short + b"\x85Re."
    yield "build", b"\x80\x02c__main__\nConfig\n)\x81}X\x01\x00\x00\x00acos\nsystem\nsb."
    yield (
        "attribute",
        b"\x80\x02c__builtin__\ngetattr\nc__builtin__\n__import__\nX\x02\x00\x00\x00os\x85RX\x01\x00\x00\x00a\x86R.",
    )
    yield "attribute of an allowed module", b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93\x8c" + short + b"\x85R."
    yield "extension", b"\x80\x02\x82\x01."
    yield "eval", b"c__builtin__\neval\n(S'1'\ntR."


HOSTILE = dict(hostile_pickles("touch ran"))


@pytest.mark.parametrize("way", HOSTILE)
def test_hostile_pickles_are_refused_by_name_and_nothing_runs(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused):
        read(HOSTILE[way])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_attributes_are_taken_of_stand_ins_only(protocol):
    class Bound:
        def __reduce__(self):
            return getattr, (datetime.timezone.utc, "utcoffset")

    record = read_back(Bound(), protocol)
    assert (record.name, record.arguments[1]) == ("builtins.getattr", "utcoffset")
    with pytest.raises(Refused, match="getattr"):
        read(b"c__builtin__\ngetattr\n((lS'append'\ntR.")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_survive_every_protocol(protocol):
    values = {
        "numbers": [0, -1, 255, 70000, 2**40, -(2**80), 1.5, True, None, 2 + 1j],
        "text": ("a", "ü\n", "x" * 300, b"\x00\xff", bytearray(b"ab"), b"y" * 300),
        "sets": [{1, 2}, {"a"}, set()],
        "nested": {"a": [{"b": ((),)}], 3: (1, 2, 3, 4)},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(int, {"k": 1}),
        "counter": collections.Counter("aab"),
    }
    found = read_back(values, protocol)
    assert found == values
    assert read_back(frozenset({1, 2}), protocol) == {1, 2}
    assert read_back(collections.deque([1, 2], maxlen=3), protocol) == [1, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_paths_and_torch_types_become_plain(protocol):
    assert read_back(np.int64(7), protocol) == 7
    assert type(read_back(np.float32(0.5), protocol)) is float
    assert read_back(np.bool_(True), protocol) is True
    assert read_back(np.str_("abc"), protocol) == "abc"
    assert read_back(pathlib.PurePosixPath("/data/x"), protocol) == "/data/x"
    assert read_back(torch.float16, protocol) is torch.float16
    assert read_back(torch.Size([2, 3]), protocol) == (2, 3)
    assert read_back(torch.device("cpu"), protocol) == "cpu"
    assert read_back(torch.__version__, protocol) == str(torch.__version__)
    big_endian, by_column = np.arange(3, dtype=">i4"), np.asfortranarray(np.eye(3)[:2])
    for array in (np.arange(6.0).reshape(2, 3), by_column, big_endian, np.zeros(0)):
        found = read_back({"a": array, "b": array}, protocol)
        np.testing.assert_array_equal(found["a"], array)
        assert found["a"] is found["b"]
    assert read_back(np.array([print, None], dtype=object)[1:], protocol).size == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_foreign_objects_keep_what_was_saved_of_them(protocol):
    settings = Settings(lr=0.1)
    settings.frozen = True
    namespace = argparse.Namespace(size=32, nested=types.SimpleNamespace(a=[1]))
    found = read_back({"settings": settings, "args": namespace, "again": namespace}, protocol)
    assert found["settings"].name.endswith("Settings")
    assert payload_fields(found["settings"]) == {"lr": 0.1}
    assert found["settings"].fields == {"frozen": True}
    assert payload_fields(found["args"])["size"] == 32
    assert payload_fields(found["args"].fields["nested"]) == {"a": [1]}
    assert found["again"] is found["args"]
    point = read_back(Point(1, 2), protocol)
    assert (point.name, point.arguments) == (f"{__name__}.Point", (1, 2))
    partial = read_back(functools.partial(Settings, 1, a=2), protocol)
    assert partial.fields["func"] == ForeignName(f"{__name__}.Settings")
    assert (partial.fields["args"], partial.fields["keywords"]) == ((1,), {"a": 2})
    assert isinstance(read_back(Colour.RED, protocol), InertRecord)
    assert read_back(datetime.timedelta(1), protocol).name == "datetime.timedelta"


def test_no_class_is_defined():
    assert read(b"\x80\x02cbuiltins\ntype\nN\x85R.").name == "builtins.type"
    with pytest.raises(Refused, match=r"builtins\.type"):
        read(b"\x80\x02cbuiltins\ntype\nX\x01\x00\x00\x00A)}\x87R.")


def test_slots_and_constructors_with_names_are_kept():
    record = SlottedSettings()
    record.size = 3
    assert read_back(record, 2).fields == {"size": 3}

    class Named:
        def __reduce_ex__(self, _protocol):
            return copyreg.__newobj_ex__, (Settings, (), {"a": 1})

    assert read_back(Named(), 4).fields == {"a": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_settings_of_omegaconf_are_read_without_it(protocol):
    config = OmegaConf.create({"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "name": "vit", "none": None})
    record = read_back(config, protocol)
    wanted = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "name": "vit", "none": None}
    assert payload_fields(record) == plain(record) == wanted


def nested_tuples(depth, end):
    return b"\x80\x02}" + b")" + b"\x85" * depth + end


def doubled_lists(times):
    numbers = [bytes([number]) for number in range(times)]
    return b"\x80\x02]" + b"".join(b"q" + n + b"](h" + n + b"h" + n + b"e" for n in numbers) + b"."


@pytest.mark.parametrize(
    "content",
    [
        nested_tuples(100_000, b"Ns."),  # hashing it would overflow the stack
        nested_tuples(100_000, b"."),
        b"\x80\x02}K\x01q\x00" + b"h\x00\x86q\x00" * 60 + b"Ns.",  # hashing it would take 2 ** 60 steps
        doubled_lists(60),  # 2 ** 60 items
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x04\x96" + struct.pack("<Q", 2**62) + b"x.",
        b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"L" + b"9" * 100_000 + b"L\n.",
        b"c__builtin__\nbytearray\nL99999999999999L\n\x85R.",
        b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R\x85R.",
        b"\x80\x02}X\x01\x00\x00\x00aNsX\x01\x00\x00\x00aNs.",  # a name twice
        b"\x80\x02N}b.",
        b"\x80\x02NN\x85R.",
        b"cbuiltins\nset\n)R]\x90.",
        *(b"R.", b"b.", b"e.", b"0.", b"g1\n.", b"\x85.", b"u.", b"Q.", b"Pid\n.", b"\x97.", b"", b"\xff.", b"."),
    ],
)
def test_absurd_pickles_end_in_an_error_soon(content):
    with pytest.raises((pickle.UnpicklingError, ValueError, IndexError, KeyError, EOFError, TypeError)):
        read(content)


def test_pickles_with_instructions_without_end_are_given_up(monkeypatch):
    monkeypatch.setattr(unpickle, "INSTRUCTIONS", 1000)
    with pytest.raises(pickle.UnpicklingError, match="too many"):
        read(b"]" * 1010 + b".")


def test_paths_are_kept_as_far_as_a_system_takes_them():
    text = b"X" + (1_000_000).to_bytes(4, "little") + b"x/" * 500_000
    path = read(b"\x80\x02cpathlib\nPosixPath\n" + text + b"\x85R.")
    assert (len(path), path[:4]) == (4095, "x/x/")


def test_memo_numbers_cost_no_memory():
    assert read(b"\x80\x02Nr\xff\xff\xff\x7f.") is None


MANY = b"\x80\x02](" + b"K\x01" * 300_000 + b"eq\x00"
COPIED = b"h\x01h\x00\x85R" * 5_000 + b"e."


@pytest.mark.parametrize(
    "content",
    [
        *(MANY + b"](cbuiltins\n" + name + b"\nq\x01" + COPIED for name in (b"list", b"tuple", b"set")),
        b"\x80\x02](" + b"X\x01\x00\x00\x00aK\x01\x86" * 100_000 + b"eq\x00](ccollections\nOrderedDict\nq\x01" + COPIED,
        b"\x80\x02}("
        + b"".join(pickle.dumps((n + 1) * (2**61 - 1), 2)[2:-1] + b"K\x01" for n in range(20_000))
        + b"u.",
    ],
    ids=["list", "tuple", "set", "dictionary", "colliding keys"],
)
def test_copies_without_end_and_keys_that_collide_are_refused_at_once(content):
    with pytest.raises(pickle.UnpicklingError, match=r"copies its content|used as a key"):
        PickleMachine(io.BytesIO(content)).load()
