"""`jaxserve qualify` on a card that is a fake. argv: the command that tries kernels, as JSON, the cache folder, and flags."""

import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.cli.main import main
from jaxserve.qualification import card, qualify
from tests.qualification import rows
from tests.qualification.conftest import CARD, LIMITS

rows.install()
tries, os.environ["JAXSERVE_CACHE"] = json.loads(sys.argv[1]), sys.argv[2]
card.find_card = lambda *, ask_jax: CARD
qualify.qualify = functools.partial(qualify.qualify, command=tries, limits=LIMITS)
sys.argv[1:] = ["qualify", *sys.argv[3:]]
main()  # its module is imported here alone: its flags are those of other commands too
