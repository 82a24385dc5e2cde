"""Makes the helpers of this folder importable by its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Random policies: grammar.py.
sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
# How waits for a GPU are found on a CPU: host_waits.py.
sys.path.append(str(Path(__file__).parents[1] / "sglang_ext"))
