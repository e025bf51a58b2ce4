"""Every test runs on the CPU, where the frameworks can be compared to the last digit."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # spinning threads crawl where tests share the cores
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("WANDB_API_KEY", None)

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
