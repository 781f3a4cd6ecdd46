"""The jaxserve command: its table, its help, vLLM's names, and what a mistake is answered with."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import jaxserve
from jaxserve.cli.common import command, vllm_flags
from jaxserve.cli.common.command import READER_LEFT, Misspelt, normalise, parse
from jaxserve.cli.main import COMMANDS
from jaxserve.config import EngineConfig, options
from scripts.write_options import server_flags as server_flags_with_help
from tests.cli import vllm_names
from tests.selection import slow_unless

ROOT = Path(__file__).parents[2]


def jaxserve_command(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", "jaxserve", *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def server_flags() -> flags.FlagValues:
    """Those of a server, in part, by themselves."""
    known = flags.FlagValues()
    flags.DEFINE_string("model", None, "", required=True, flag_values=known)
    flags.DEFINE_list("served_model_name", [], "", flag_values=known)
    flags.DEFINE_integer("page_size", None, "", flag_values=known)
    flags.DEFINE_integer("num_pages", None, "", flag_values=known)
    flags.DEFINE_integer("seed", 0, "", flag_values=known)
    flags.DEFINE_integer("tensor_parallel_size", 1, "", flag_values=known)
    flags.DEFINE_integer("pipeline_parallel_size", 1, "", flag_values=known)
    flags.DEFINE_multi_string("stop", [], "", flag_values=known)
    flags.DEFINE_bool("enable_prefix_caching", True, "", flag_values=known)
    flags.DEFINE_bool("access_log", True, "", flag_values=known)
    flags.DEFINE_string("speculative_config", None, "", flag_values=known)
    flags.DEFINE_float("gpu_memory_utilization", 0.9, "", flag_values=known)
    return known


def parsed(*args: str) -> tuple[dict[str, object], list[str]]:
    """(values of the flags that were given, other arguments)."""
    known = server_flags()
    rest = parse(["serve", *args], known)
    return {name: known[name].value for name in known if known[name].present}, rest


# ---- the table of commands


def test_the_commands_are_listed_with_a_line_each():
    done = jaxserve_command("--help")
    assert done.returncode == 0 and not done.stderr
    for name, line in COMMANDS.items():
        assert f"  {name} " in done.stdout and line in done.stdout
    some = jaxserve_command("tune", "--help")
    assert some.returncode == 0 and "tune buckets" in some.stdout and "bench" not in some.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("sevre", "x"), "unknown command sevre; did you mean `jaxserve serve`?"),
        (("bench", "latncy"), "unknown command bench latncy; did you mean `jaxserve bench latency`?"),
        (("qqqq",), "unknown command qqqq; `jaxserve --help` lists them"),
        (("serve", "x", "--max-modl-len=3"), "unknown flag --max-modl-len; did you mean --max_model_len?"),
        (("generate", "x", "--qqqq"), "unknown flag --qqqq; --help lists the flags"),
        (("--help=serve",), "jaxserve: --help=serve: --help takes no value"),
        (("tune", "--help=all"), "jaxserve tune: --help=all: --help takes no value"),
        (("serve", "x", "--help=page_size"), "jaxserve serve: --help=page_size: --help takes no value"),
        (("help", "sevre"), "unknown command sevre; did you mean `jaxserve serve`?"),
        (("generate", "--model=x", "--max_tokens"), "--max_tokens needs a value"),
        (
            ("serve", "x", "--data-parallel-size=2"),
            "an engine's devices are counted by --tensor_parallel_size and --pipeline_parallel_size",
        ),
        (("serve", "x", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype=fp8: the KV cache has the weights' dtype"),
        (("serve", "x", "--enforce-eager"), "--enforce-eager is vLLM's: every step is a compiled program"),
    ],
)
def test_what_is_misspelt_is_answered_in_one_line(args, said):
    done = jaxserve_command(*args)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("jaxserve")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serve",), "jaxserve serve: give --model"),
        (("serve", "x", "y"), "jaxserve serve: unknown arguments ['y']"),
        (("version", "y"), "jaxserve version: unknown arguments ['y']"),
        (("serve", "x", "--port=99999"), "flag --port=99999"),
        (("serve", "x", "--page_size=0"), "flag --page_size=0"),
        (("serve", "x", "--tensor-parallel-size=0"), "flag --tensor_parallel_size=0: must be an integer >= 1"),
        (("simulate", "--page_size=3"), "flag --page_size=3: must be a power of two"),
        (("simulate", "--tbt_slo_ms=-5"), "flag --tbt_slo_ms=-5.0: must be milliseconds above 0"),
    ],
)
def test_bad_values_are_answered_in_one_line(args, said):
    done = jaxserve_command(*args)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_each_missing_flag_has_a_line():
    done = jaxserve_command("convert")
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == ["jaxserve convert: give --model", "jaxserve convert: give --output"]


@pytest.mark.parametrize(
    ("args", "missing", "extra"),
    [
        (("serve", "x"), "fastapi", "serve"),
        (("router", "--backends=http://127.0.0.1:9"), "aiohttp", "serve"),
        (("serve", "x", "--ray"), "ray", "ray"),
        (("generate", "x", "--ray", "--prompt=a", "--output=OUTPUT"), "ray", "ray"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(args, missing, extra, tmp_path):
    args = [arg.replace("OUTPUT", str(tmp_path / "out.jsonl")) for arg in args]
    code = f"import sys; sys.modules[{missing!r}] = None; from jaxserve.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"jaxserve {args[0]}: needs {missing}: pip install 'jaxserve[{extra}]'\n"


@pytest.mark.parametrize("error", ["ValueError", "NotImplementedError", "OSError", "KeyError"])
def test_what_a_command_reads_is_refused_in_one_line_and_a_bug_keeps_its_traceback(error):
    """A bug: what is raised beside the reading, or is no error of bad input."""
    code = (
        "from jaxserve.cli.common.command import refuse_bad_input, run_command\n"
        "def main():\n"
        "    with {context}:\n"
        "        raise {error}('it is empty')\n"
        "run_command(main, name='jaxserve tune buckets')"
    )

    def said(context: str) -> str:
        command = [sys.executable, "-c", "import contextlib\n" + code.format(context=context, error=error)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    in_one_line = said("refuse_bad_input()") == "jaxserve tune buckets: it is empty\n"
    assert in_one_line == (error != "KeyError")
    assert said("contextlib.nullcontext()").startswith("Traceback")


def test_nothing_is_collected_meanwhile_and_what_was_made_is_not_looked_at_later():
    code = """
import gc
from jaxserve.cli.common.command import without_collecting
with without_collecting():
    assert not gc.isenabled()
    made = [[] for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() >= 1000
gc.unfreeze()
try:
    with without_collecting():
        raise OSError
except OSError:
    assert gc.isenabled() and not gc.get_freeze_count()
gc.disable()
with without_collecting():
    pass
assert not gc.isenabled()  # as it was
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version():
    done = jaxserve_command("version")
    assert done.returncode == 0 and done.stdout.startswith(f"jaxserve {jaxserve.__version__} (Python 3.")
    assert "jax 0." in done.stdout and "flax 0." in done.stdout
    assert jaxserve_command("--version").stdout == done.stdout


def test_help_of_a_command_stands_before_or_behind_it():
    for args in ((), ("bench",), ("bench", "latency"), ("serve",), ("version",)):
        before, behind = jaxserve_command("help", *args), jaxserve_command(*args, "--help")
        assert before.returncode == behind.returncode == 0 and not before.stderr
        assert before.stdout == behind.stdout and before.stdout.startswith(" ".join(("usage: jaxserve", *args)))


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["version"]], ids=" ".join)
def test_a_reader_that_leaves_ends_it_without_a_word(args):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "jaxserve", *args], cwd=ROOT, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (READER_LEFT, b"")


def test_help_groups_flags_and_tells_defaults():
    done = jaxserve_command("serve", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: jaxserve serve MODEL")
    for title in ("Flags:", "Where to listen:", "Limits and memory:", "Scheduling:", "Speculation:"):
        assert f"\n{title}\n" in done.stdout
    assert (
        "--gpu_memory_utilization=float (default 0.9)" in done.stdout
        and "--[no]enable_prefix_caching (default True)" in done.stdout
    )
    assert "logtostderr" not in done.stdout, "absl's own flags are not the command's business"
    assert "--page_size=int\n      Tokens of a KV page, a power of two. Unset: 64.\n" in done.stdout


@pytest.mark.parametrize(
    "args",
    slow_unless(lambda args: args in ((), ("serve",)), [(), *((*name.split(),) for name in COMMANDS if name != "version")]),
    ids=" ".join,
)
def test_help_is_quick(args):
    """In CPU time of the best of three, which other processes hardly lengthen; that no heavy library is loaded is
    tests/test_imports.py's."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert jaxserve_command(*args, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, "0.09 to 0.17 on an idle machine"


# ---- names of flags


def test_the_first_argument_is_the_model():
    assert parsed("folder") == ({"model": "folder"}, [])
    assert parsed("--seed", "3", "folder") == ({"seed": 3, "model": "folder"}, [])
    assert parsed("--model=folder", "other") == ({"model": "folder"}, ["other"])
    assert parsed("--", "--folder") == ({"model": "--folder"}, [])


def test_dashes_and_underscores_are_one_but_not_in_values():
    assert parsed("--model", "a-b_c", "--served-model-name=my-model", "--gpu-memory_utilization=0.5")[0] == {
        "model": "a-b_c",
        "served_model_name": ["my-model"],
        "gpu_memory_utilization": 0.5,
    }
    given, _ = parsed("m", "--stop", "--not-a-flag", "--stop=-x-", "--seed", "-1")
    assert given == {"model": "m", "stop": ["--not-a-flag", "-x-"], "seed": -1}


@pytest.mark.parametrize(
    ("args", "given"),
    [
        (("--block-size=16",), {"page_size": 16}),
        (("--block-size", "16"), {"page_size": 16}),
        (("--num-gpu-blocks-override=9",), {"num_pages": 9}),
        (("--no-enable-prefix-caching",), {"enable_prefix_caching": False}),
        (("--noenable_prefix_caching",), {"enable_prefix_caching": False}),
        (("--enable-prefix-caching",), {"enable_prefix_caching": True}),
        (("--disable-uvicorn-access-log",), {"access_log": False}),
        (("--speculative-config", '{"a": 1}'), {"speculative_config": '{"a": 1}'}),
        (("--device-memory-utilization=0.5",), {"gpu_memory_utilization": 0.5}),
        (("--data-parallel-size=1", "-dp", "1", "--seed=4"), {"seed": 4}),
        (("-tp", "2", "-pp", "3"), {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        (("--enable-auto-tool-choice", "--no-enable-lora", "--swap-space", "0"), {}),
    ],
)
def test_vllms_names_stand_for_ours(args, given):
    assert parsed("m", *args) == ({"model": "m"} | given, [])


def test_every_name_of_vllms_that_is_missing_is_refused_with_what_to_use():
    known = server_flags()
    for name, row in vllm_flags.MISSING.items():
        assert name not in options() and len(row.instead) > 10
        flag = f"--{name.replace('_', '-')}"
        if name in row.granted.split():
            assert normalise([flag], known) == ([], [])
        else:
            with pytest.raises(Misspelt, match=flag) as error:
                normalise([flag, "none such"], known)
            assert row.instead in str(error.value)
        if name in row.names.split():
            for value in row.accepts:
                assert normalise([f"{flag}={value}"], known) == normalise([flag, value], known) == ([], [])
        else:
            assert normalise([f"--no-{flag[2:]}"], known) == ([], []), "off, as it is here"
    of_servers = {"noaccess_log", "grace", "num_hosts", "host_id", "otlp_endpoint", "api_server_count"}
    assert set(vllm_flags.OURS.values()) - of_servers <= set(options())
    names = [name for rows in vllm_flags.ROWS.values() for row in rows for name in (row.names, row.switches, row.granted)]
    assert len(" ".join(names).split()) == len(vllm_flags.MISSING), "a name has one row"


def test_every_flag_of_vllms_is_ours_or_has_a_row():
    """None is "unknown", with a hint at some other flag; and the tables know which of them take a value."""
    ours = set(server_flags_with_help()) | set(vllm_flags.OURS)
    theirs = {name.replace("-", "_"): name in vllm_names.SWITCHES for name in (*vllm_names.VALUED, *vllm_names.SWITCHES)}
    assert len(theirs) == 340 and not [name for name in theirs if name not in ours | set(vllm_flags.MISSING)]
    rows = {name: row for name, row in vllm_flags.MISSING.items() if name in theirs}
    assert not [name for name, row in rows.items() if theirs[name] != (name not in row.names.split())]
    assert not ours & set(vllm_flags.MISSING)
    assert sorted(vllm_flags.SAME) == sorted(theirs.keys() & ours - set(vllm_flags.OURS))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--compilation-config.level=3", "--compilation-config.level is vLLM's: programs are compiled ahead"),
        ("-cc.pass_config.fuse=1", "-cc.pass_config.fuse is vLLM's: programs are compiled ahead"),
        ("-O3", "-O3 is vLLM's: programs are compiled ahead"),
        ("--speculative-config.method=ngram", "--speculative-config.method is vLLM's: give --speculative_config whole, as JSON"),
        ("--load-format.auto", "--load-format.auto is vLLM's: what a file holds is told from the file"),
        ("--seed.of=3", "unknown flag --seed.of"),
    ],
)
def test_a_name_with_a_dot_is_answered_by_what_stands_before_it(flag, said):
    with pytest.raises(Misspelt) as error:
        normalise([flag], server_flags())
    assert str(error.value).startswith(said)


def test_commands_without_an_engine_know_nothing_of_vllm():
    known = flags.FlagValues()
    flags.DEFINE_integer("tp", 1, "", flag_values=known)
    assert normalise(["--tp=2"], known) == (["--tp=2"], [])
    with pytest.raises(Misspelt, match="unknown flag --block-size"):
        normalise(["--block-size=2"], known)


def test_the_tables_are_told_as_markdown():
    helps = server_flags_with_help() | {"seed": "this | that"}
    text = vllm_flags.markdown(helps)
    assert "| `--seed` | this \\| that |" in text and "| `--uds` | Listen on a Unix domain socket" in text
    assert "| `--block-size` | `--page-size` | Tokens of a KV page, a power of two. Unset: 64. |" in text
    assert "| `--disable-uvicorn-access-log` | `--noaccess-log` | Turns off: A line a request on stderr" in text
    assert re.search(r"^\| `--data-parallel-size`, `-dp`, .* \| `1` \| an engine's devices are counted", text, re.MULTILINE)
    every = (*vllm_flags.SAME, *vllm_flags.OURS, *vllm_flags.MISSING)
    assert not [name for name in every if f"-{name.replace('_', '-')}`" not in text]
    assert not set(vllm_flags.SAME) & (vllm_flags.OURS.keys() | vllm_flags.MISSING.keys())


# ---- flags of the engine


def test_flags_are_the_table():
    """Every option has a flag with its default; what the flags give makes the config that nothing makes."""
    code = (
        "import json, sys\n"
        "from absl import flags\n"
        "from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options\n"
        "define_engine_flags(model='x')\nflags.FLAGS(['x'])\nprint(json.dumps(engine_options()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    import json

    given = json.loads(done.stdout)
    assert list(given) == list(options())
    assert EngineConfig(**given) == EngineConfig()


@pytest.mark.parametrize("value", slow_unless(lambda value: value == "1.5", ["0", "-1", "1.5"]))
def test_a_flag_that_does_not_fit_its_range_is_refused_as_the_config_refuses_it(value):
    assert command.MISSPELT == 2
    done = jaxserve_command("generate", "x", "--prompt=a", f"--gpu_memory_utilization={value}")
    assert done.returncode == 1 and "gpu_memory_utilization" in done.stderr and len(done.stderr.splitlines()) == 1


def test_vllms_names_of_values_are_ours():
    known = flags.FlagValues()
    flags.DEFINE_enum("dtype", "auto", ["auto", "float16", "float32"], "", flag_values=known)
    assert normalise(["--dtype", "half"], known) == normalise(["--dtype=float16"], known) == (["--dtype=float16"], [])
    assert normalise(["--dtype=float"], known) == (["--dtype=float32"], [])
