"""Which drafts stand, row by row, against a loop over sequences; and what a user may ask of speculation."""

import jax
import numpy as np
import pytest

from jaxserve.speculative import verify
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import NO_DRAFT


def test_rows_against_a_loop():
    rng = np.random.default_rng(0)
    follows, delivered_of, last_of, after_of = map(
        jax.jit, (verify.follows, verify.delivered, verify.last_delivered, verify.drafts_after)
    )
    num_refused = num_bad = num_whole = 0
    for _ in range(300):
        rows, tokens, delivered, last, after = [], [], [], [], []
        sampled, bad = rng.integers(0, 3, 40), rng.random(40) < 0.1
        for seq in rng.permutation(8)[: rng.integers(1, 8)].tolist():
            drafts, stands = rng.integers(-1, 3, rng.integers(0, 4)).tolist(), True
            first = len(rows)
            for j, token in enumerate([9, *drafts]):  # 9: the sequence's last token, whatever was sampled elsewhere
                if j:
                    refused = token != sampled[len(rows) - 1] or bad[len(rows)]
                    num_refused, num_bad = num_refused + refused, num_bad + (stands and bool(bad[len(rows)]))
                    stands = stands and not refused
                for column, value in ((rows, seq), (tokens, token), (delivered, stands)):
                    column.append(value)
            num_whole += stands and bool(drafts)
            count = sum(delivered[first:])
            last += [j == count - 1 for j in range(1 + len(drafts))]
            after += [*drafts, NO_DRAFT]
        n, padding = len(rows), 40 - len(rows)
        is_draft, padded = follows(np.array(rows + [8] * padding, np.int32)), np.array(tokens + [0] * padding, np.int32)
        found = delivered_of(is_draft, padded, sampled, bad)
        assert found[:n].tolist() == delivered
        assert last_of(is_draft, found)[:n].tolist() == last
        assert after_of(is_draft, padded)[:n].tolist() == after
    assert num_refused > 100 and num_bad > 20 and num_whole > 50


def test_config():
    config = SpeculativeConfig.make({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5), "one alone is both, as in vLLM"
    assert SpeculativeConfig.make('{"num_speculative_tokens": 3}') == SpeculativeConfig(num_speculative_tokens=3)
    assert SpeculativeConfig.make(config) is config


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0 must be an integer in \[1, 64\]"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be"),
        ({}, "needs num_speculative_tokens"),
        ({"method": "mtp", "num_speculative_tokens": 2}, "method='mtp' must be one of ngram"),
        ({"num_speculative_tokens": 2, "quantization": "x"}, "unknown fields quantization; it may have method"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3 must not exceed"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 0}, "prompt_lookup_min=0 must be"),
        ({"num_speculative_tokens": 2, "acceptance": "always"}, "acceptance='always' must be one of sampled, rejection"),
        ({"num_speculative_tokens": 2, "adaptive": 1}, "adaptive=1 must be True or False"),
        ("{", "is not JSON"),
        (4, "must be a dict"),
    ],
)
def test_config_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.make(given)
