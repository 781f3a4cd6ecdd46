"""What tries kernels, with the rows of tests/qualification/rows.py in its table."""

import sys

from kernels.qualification.__main__ import main
from tests.qualification import rows

rows.install()
sys.exit(main())
