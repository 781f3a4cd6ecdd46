"""`jaxserve qualify` on a card that is a fake. argv: the command that tries kernels, as JSON, the cache folder, and flags."""

import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.cli import qualify as command
from jaxserve.cli.common.command import run_command
from jaxserve.qualification import card, qualify
from tests.qualification import rows
from tests.qualification.conftest import CARD, LIMITS

rows.install()
tries, os.environ["JAXSERVE_CACHE"] = json.loads(sys.argv[1]), sys.argv[2]
card.find_card = lambda *, ask_jax: CARD
qualify.qualify = functools.partial(qualify.qualify, command=tries, limits=LIMITS)
sys.argv[1:] = sys.argv[3:]
run_command(command.main)
