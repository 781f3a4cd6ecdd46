"""The check of test_engine_exactness.py can fail: it finds each classic fault of an engine like this one.

A fault is put in by changing one expression of the engine's source; then the same requests are served and the answers must
differ from those that each request got alone. A fault whose expression is no longer there fails loudly: find its new place.
"""

import __future__

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from jaxserve.batching.layout import StepLayout
from jaxserve.batching.packer import BatchPacker
from jaxserve.engine import pipeline
from jaxserve.execution import body
from jaxserve.request import Request
from jaxserve.sampling import logit_edits
from jaxserve.scheduling import page_pool
from jaxserve.scheduling.lifecycle import RequestLifecycle
from jaxserve.scheduling.step_composer import StepComposer
from jaxserve.scheduling.token_intake import TokenIntake
from tests.dummy import ONE_BUCKET, differences, dummy_model, make_engine, serve
from tests.selection import slow_unless
from tests.workload import SMALL_POOL, alone, requests


@dataclass(frozen=True)
class Fault:
    owner: Any  # the module or class
    function: str
    right: str
    wrong: str

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = inspect.getattr_static(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(getattr(found, "func", found)))
        assert source.count(self.right) == 1, f"{self.right!r} is not (once) in {self.function}"
        module = sys.modules[getattr(self.owner, "__module__", self.owner.__name__)]
        names: dict[str, Any] = {}
        code = compile(source.replace(self.right, self.wrong), "fault", "exec", __future__.annotations.compiler_flag)
        exec(code, vars(module), names)
        changed = names[self.function]
        if hasattr(changed, "__set_name__"):
            changed.__set_name__(self.owner, self.function)
        monkeypatch.setattr(self.owner, self.function, changed)


ON_THE_HOST = {
    "page_table_padded_with_a_live_page": Fault(
        StepLayout, "padding", '["page_updates"][:] = (self.max_num_seqs, 0, 0)', '["page_updates"][:] = (0, 0, 0)'
    ),
    "sequences_padded_with_a_live_row": Fault(StepLayout, "padding", '["seq_rows"][:] = self.max_num_seqs', '["seq_rows"][:] = 0'),
    "logits_rows_padded_with_a_live_row": Fault(
        StepLayout, "padding", '["logits_rows"][:] = self.max_num_seqs', '["logits_rows"][:] = 0'
    ),
    "reservation_ignores_the_steps_token": Fault(StepComposer, "_decodes", "starts >= rows.capacity", "starts > rows.capacity"),
    "reservation_ignores_the_steps_chunk": Fault(
        StepComposer, "_admit", "self._num_tokens_to_hold(request)", "self._num_tokens_to_hold(request) - num_tokens"
    ),
    "last_row_of_the_batch": Fault(
        BatchPacker, "pack", 'view["logits_tokens"][:r] = tokens', 'view["logits_tokens"][:r] = schedule.num_tokens - 1'
    ),
    "decode_twice_for_one_position": Fault(
        BatchPacker,
        "pack",
        'view["starts"][:d] = FROM_DEVICE',
        'view["starts"][:d] = [len(r.token_ids) - 1 for r in schedule.requests[:d]]',
    ),
    "chunk_samples": Fault(StepComposer, "_add_chunk", "append(start + num_tokens == rows.prefill_end[row])", "append(True)"),
    "padding_taken_for_eos": Fault(TokenIntake, "take", "own &= samples", "pass"),
    "eos_taken_for_padding": Fault(Request, "end", "token in self.stop_ids and", "token and token in self.stop_ids and"),
    "late_token_given_to_the_rows_new_owner": Fault(
        TokenIntake, "take", "own = state.generation[rows] == schedule.generations", "own = np.ones(len(rows), bool)"
    ),
    "preempted_request_forgets_its_token_in_flight": Fault(
        RequestLifecycle, "preempt", "request.num_unfetched = request.num_in_flight", "request.num_unfetched = 0"
    ),
    "sampling_parameters_of_the_former_owner": Fault(
        BatchPacker, "newcomers", "self._generations[schedule.rows] != schedule.generations", "self._generations[schedule.rows] < 0"
    ),
    "sampling_parameters_by_place": Fault(BatchPacker, "pack", "self.sampling.take(rows,", "self.sampling.take(range(r),"),
    "edits_of_the_former_owner": Fault(
        BatchPacker, "newcomers", "or kinds_of(request.params):", "or kinds_of(request.params) and not schedule.generations[i]:"
    ),
    "history_without_the_output_before_a_preemption": Fault(
        BatchPacker, "newcomers", "request.params, request.token_ids,", "request.params, request.prompt_token_ids,"
    ),
    "page_updates_past_the_upload_dropped": Fault(
        BatchPacker,
        "pack",
        "schedule.page_updates[layout.num_updates :]",
        "schedule.page_updates[:0]",
    ),
    "whole_prompt_hit": Fault(page_pool.PagePool, "match", "(len(token_ids) - 1) // self", "len(token_ids) // self"),
    "scored_prompt_read_from_the_cache": Fault(
        StepComposer,
        "_max_shared",
        "num_tokens = min(num_tokens, scores.next)",
        "scores.next = max(scores.next, num_tokens)",
    ),
    "score_of_the_token_before": Fault(pipeline, "spans_of", "row + position - 1 - start", "row + position - start"),
    "page_hash_ignores_what_came_before": Fault(page_pool, "page_hash", "sha256(parent + ", "sha256("),
}

ON_THE_DEVICE = {
    "prefill_advances_by_one": Fault(
        body,
        "_context",
        'num_computed.at[rows].set(kv_lens, mode="drop")',
        'num_computed.at[rows].set(jnp.minimum(starts + 1, kv_lens), mode="drop")',
    ),
    "sampled_tokens_not_remembered": Fault(
        logit_edits, "remember", 'history.at[seq_rows, positions].set(tokens, mode="drop")', "history"
    ),
    "padding_writes_to_a_live_page": Fault(body, "_context", "num_pages * page_size + t)", "t)"),
}


def fault_is_found(compile_anew: str = "") -> bool:
    """Whether any answer differs; or the engine, or its outputs, contradict themselves on the way."""
    settings = {"pool_pages": SMALL_POOL[True], "bucket_plan": ONE_BUCKET}
    an_engine = make_engine(dummy_model(), compile_anew=compile_anew, **settings)
    try:
        answers = serve(an_engine, requests(True, False), check=False, max_steps=250).answers
    except (AssertionError, KeyError):
        return True
    return differences(answers, alone("float32", True)) != []


@pytest.mark.parametrize("compile_anew", ["", pytest.param("bodies", marks=pytest.mark.slow), "all"])
def test_no_fault_is_found_where_none_is(compile_anew):
    assert not fault_is_found(compile_anew)


def test_source_put_back_is_no_fault(monkeypatch):
    """That a function runs from its source again is not what is found."""
    alone("float32", True)
    for fault in {(fault.owner, fault.function): fault for fault in ON_THE_HOST.values()}.values():
        Fault(fault.owner, fault.function, fault.right, fault.right).put_in(monkeypatch)
    assert not fault_is_found()


def test_traced_source_put_back_is_no_fault(monkeypatch):
    alone("float32", True)
    for fault in {fault.function: fault for fault in ON_THE_DEVICE.values()}.values():
        Fault(fault.owner, fault.function, fault.right, fault.right).put_in(monkeypatch)
    assert not fault_is_found(compile_anew="all")


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_fault_on_the_host_is_found(name, monkeypatch):
    alone("float32", True)  # before the fault
    ON_THE_HOST[name].put_in(monkeypatch)
    assert fault_is_found()


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "prefill_advances_by_one", ON_THE_DEVICE))
def test_fault_on_the_device_is_found(name, monkeypatch):
    alone("float32", True)
    ON_THE_DEVICE[name].put_in(monkeypatch)
    assert fault_is_found(compile_anew="all" if ON_THE_DEVICE[name].function == "remember" else "bodies")
