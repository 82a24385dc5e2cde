"""Makes the helpers of this folder, and those that compare executions, importable by its tests."""

import sys
from pathlib import Path

for folder in ("fuzz", "executions", "sglang_ext"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
