"""Which card this is: by NVIDIA's management library before JAX has started, by JAX where that can't say."""

import types

import jax
import pytest

from jaxserve.qualification import card as module
from jaxserve.qualification.card import find_card, revision


class Library:
    """NVIDIA's, as ctypes would have it. fails: the function that returns an error."""

    def __init__(self, *gpus: tuple[str, int, int], fails: str = ""):
        self.gpus, self.fails, self.open = gpus, fails, 0

    def __getattr__(self, name: str):
        def call(*args):
            if name == self.fails:
                return 3
            return getattr(self, f"_{name}")(*args) or 0

        return call

    def _nvmlInit_v2(self):
        self.open += 1

    def _nvmlShutdown(self):
        self.open -= 1

    def _nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"550.54.15"

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, i, handle):
        handle._obj.value = 100 + i.value

    def _nvmlDeviceGetName(self, handle, text, size):
        text.value = self.gpus[handle.value - 100][0].encode()

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.gpus[handle.value - 100][1:]


class Driver:
    """NVIDIA's, as ctypes would have it: SMs of each device that CUDA shows. fails: the function that returns an error."""

    def __init__(self, *sms: int, fails: str = ""):
        self.sms, self.fails, self.started = sms, fails, False

    def __getattr__(self, name: str):
        def call(*args):
            if name == self.fails or name != "cuInit" and not self.started:
                return 3
            return getattr(self, f"_{name}")(*args) or 0

        return call

    def _cuInit(self, zero):
        self.started = zero.value == 0

    def _cuDeviceGetCount(self, count):
        count._obj.value = len(self.sms)

    def _cuDeviceGet(self, device, i):
        device._obj.value = 10 + i.value

    def _cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute.value == 16
        value._obj.value = self.sms[device.value - 10]


@pytest.fixture
def machine(monkeypatch):
    """Of GPUs, a machine with them, JAX's plugin, and a JAX that nothing keeps from them. sms: of each; driver: fails as told."""

    def make(*gpus, plugin=True, platforms=None, sms=None, driver="", **options):
        library = Library(*gpus, **options)
        monkeypatch.setattr(module, "_management_library", lambda: library)
        sms = [132] * len(gpus) if sms is None else sms
        monkeypatch.setattr(module, "_driver_library", lambda: Driver(*sms, fails=driver))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(module, "PLUGINS", ("sys",) if plugin else ("no_such_module",))
        jax.config.update("jax_platforms", platforms)
        return library

    before = jax.config.values["jax_platforms"]
    yield make
    jax.config.update("jax_platforms", before)


H100 = ("NVIDIA H100 80GB HBM3", 9, 0)


def test_the_library_says_which_card_this_is(machine, monkeypatch):
    library = machine(H100, H100)
    monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("JAX must be left alone"))
    card = find_card(ask_jax=False)
    assert card is not None and library.open == 0
    assert (card.name, card.compute_capability, card.driver) == ("NVIDIA H100 80GB HBM3", "9.0", "550.54.15")
    assert (card.jax, card.platform) == (jax.__version__, "gpu") and card.jaxlib and card.kernels == revision()
    assert str(card).startswith("NVIDIA H100 80GB HBM3 (compute capability 9.0, driver 550.54.15, jax ")
    assert card.num_sms == 132 and str(card).endswith(", 132 SMs)")


def device(name="NVIDIA L4", platform="gpu", capability="8.9", sms=58):
    return types.SimpleNamespace(device_kind=name, platform=platform, compute_capability=capability, core_count=sms)


def test_of_several_kinds_jax_says_which_is_its_own(machine, monkeypatch):
    machine(H100, ("NVIDIA L4", 8, 9), sms=(132, 58))
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    assert find_card(ask_jax=False) is None
    card = find_card(ask_jax=True)
    assert card is not None and (card.name, card.compute_capability, card.driver) == ("NVIDIA L4", "8.9", "550.54.15")
    assert card.num_sms == 58


def test_a_mig_slice_is_a_card_of_its_own(machine, monkeypatch):
    """By its SMs: the management library names the whole card."""
    monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("JAX must be left alone"))
    machine(H100)
    whole = find_card(ask_jax=False)
    machine(H100, sms=(16,))
    small = find_card(ask_jax=False)
    assert whole is not None and small is not None and whole.key != small.key
    assert (small.name, small.num_sms) == ("NVIDIA H100 80GB HBM3", 16)


@pytest.mark.parametrize("options", [{"sms": (16, 60)}, {"sms": ()}, *({"driver": f"cu{name}"} for name in ("Init", "DeviceGet"))])
def test_of_several_slices_or_without_the_driver_jax_says_how_many_sms(machine, monkeypatch, options):
    machine(H100, **options)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("NVIDIA H100 80GB HBM3 MIG 3g.40gb", capability="9.0", sms=60)])
    assert find_card(ask_jax=False) is None
    card = find_card(ask_jax=True)
    assert card is not None and card.num_sms == 60


@pytest.fixture
def installed(monkeypatch):
    """Of distributions and their versions, an environment that has them alone; nothing is on PATH."""

    def make(**versions):
        def version(name):
            if (found := versions.get(name.replace("-", "_"))) is None:
                raise module.importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(module.importlib.metadata, "version", version)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: versions.get(name))
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CUDA_ROOT", raising=False)
        module.ptxas_version.cache_clear()

    yield make
    module.ptxas_version.cache_clear()


@pytest.mark.parametrize("cuda, wheel", [(13, "nvidia_cuda_nvcc"), (12, "nvidia_cuda_nvcc_cu12")])
def test_the_plugin_and_the_wheel_of_ptxas_are_named(installed, cuda, wheel):
    installed(**{f"jax_cuda{cuda}_plugin": "0.11.2", wheel: "1.2.3"})
    assert (module.plugin_version(), module.ptxas_version()) == (f"jax-cuda{cuda}-plugin 0.11.2", "1.2.3")


def test_without_wheels_they_are_unknown(installed):
    installed()
    assert (module.plugin_version(), module.ptxas_version()) == ("unknown", "unknown")


@pytest.mark.parametrize(
    "says, version",
    [
        ("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "13.0.88"),
        ("echo of another kind", "unknown"),
        ("exit 3", "unknown"),
    ],
)
def test_a_ptxas_of_cuda_root_comes_before_the_wheel_and_is_asked(installed, monkeypatch, tmp_path, says, version):
    installed(nvidia_cuda_nvcc="1.2.3")
    (tmp_path / "bin").mkdir()
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.write_text(f"#!/bin/sh\n{says}\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    assert module.ptxas_version() == version
    monkeypatch.delenv("CUDA_ROOT")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    module.ptxas_version.cache_clear()
    assert module.ptxas_version() == "1.2.3"


def test_both_ways_give_one_key(machine, monkeypatch):
    """Else what was found before the weights would be asked for again after them."""
    machine(H100)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("NVIDIA H100 80GB HBM3", capability="9.0")])
    early, late = find_card(ask_jax=False), find_card(ask_jax=True)
    assert early is not None and late is not None and early == late and early.key == late.key


@pytest.mark.parametrize("fails", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_a_library_that_fails_leaves_the_answer_to_jax(machine, monkeypatch, fails):
    library = machine(H100, fails=fails)
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    assert find_card(ask_jax=False) is None and library.open == 0
    card = find_card(ask_jax=True)
    assert card is not None and card.name == "NVIDIA L4"


def test_without_the_library_the_driver_is_read_from_the_system_or_unknown(machine, monkeypatch, tmp_path):
    machine(fails="nvmlInit_v2")
    monkeypatch.setattr(module, "_management_library", lambda: None)
    file = tmp_path / "version"
    monkeypatch.setattr(module, "Path", lambda path: file)
    assert module.driver_version() == "unknown"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:\n")
    assert module.driver_version() == "550.54.15"


@pytest.mark.parametrize("options", [{"plugin": False}, {"platforms": "cpu"}, {"platforms": "tpu,cpu"}])
def test_no_card_where_jax_uses_none(machine, monkeypatch, options):
    machine(H100, **options)
    monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("JAX must be left alone"))
    assert find_card(ask_jax=True) is None


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_card_where_all_are_hidden(machine, monkeypatch, visible):
    machine(H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_card(ask_jax=False) is None


def test_no_card_where_jax_has_taken_the_cpu(machine, monkeypatch):
    machine(H100)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("cpu", "cpu")])
    assert find_card(ask_jax=True) is None


def test_a_machine_without_the_library_has_no_gpus(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert module.gpus() == []


def test_the_revision_is_that_of_the_source(tmp_path):
    def of(**files):
        folder = tmp_path / "-".join(sorted(files))
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        revision.cache_clear()
        return revision(folder)

    assert of(a="x", b="y") == of(a="x", b="y") != of(a="x", b="z")
    assert of(ab="") != of(a="b")
    (tmp_path / "a-b" / "sizes.json").write_text("{}")
    assert of(a="x", b="z") != of(a="x", b="y")
    revision.cache_clear()
    assert revision() == revision() and len(revision()) == 16
