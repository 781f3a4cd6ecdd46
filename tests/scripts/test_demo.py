"""scripts.demo without what it checks by. That it answers as transformers do is `make demo`'s own exit status."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from absl import app
from scripts import demo, fetch_demo_model
demo.GOLDENS = Path(sys.argv.pop())
def fetch():
    raise AssertionError("fetched before the golden was looked for")
fetch_demo_model.fetch = fetch
app.run(demo.main)
"""


def test_a_missing_golden_is_a_failure(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith(f"demo: {tmp_path / 'none.json'} is missing") and "Traceback" not in done.stderr
