"""How SGLang is served on a CPU: arguments and environment, as the tools have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SERVED = json.loads((Path(__file__).parents[2] / "tools" / "sglang_cpu.json").read_text())
CPU_ARGUMENTS: dict[str, Any] = _SERVED["arguments"]
CPU_ENVIRONMENT: dict[str, str] = _SERVED["environment"]
