"""Makes the helpers of this folder importable by its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# For grammar.py: random policies.
sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
# For host_waits.py: finds waits for a GPU on a CPU.
sys.path.append(str(Path(__file__).parents[1] / "sglang_ext"))
